"""A program of a user passes a strict type checker, and with a mistake in it does not."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import PROGRAMS, ROOT

PROGRAM = (PROGRAMS / "training.py").read_text()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library as an ordinary installation lays it out; an editable one has no types."""
    folder = tmp_path_factory.mktemp("types")
    shutil.copytree(ROOT / "package", folder / "twinfeed")
    for package in ("samplers", "loaders"):
        shutil.copytree(ROOT / package, folder / "twinfeed" / package)
    return folder


CHECKERS = {
    "mypy": ["mypy", "--strict", "--follow-imports=silent", "."],
    "pyright": ["basedpyright", "--pythonpath", sys.executable, "."],
}

MISTAKES = {
    "a key of a typed batch": ('batch["image"].shape', 'batch["imgae"].shape', '"imgae"'),
    "an attribute of a batch": ("other.keys()", "other.imgae", '"imgae"'),
    "an option of a loader": ("prefetch=2", "prefetched=2", '"prefetched"'),
    "an option of another library": ("prefetch=2", "pin_memory=True", '"pin_memory"'),
    "an option of a feed": ('missing="late"', 'mising="late"', '"mising"'),
    "a value of an option": ('fit="crop"', 'fit="crob"', '"fit"'),
    "an option of a sampler": ("batch_size=32", "batchsize=32", '"batchsize"'),
    "a place of an option": ("order, batch_size=32", "order, 32", "positional argument"),
    "a method": ("state_dict()", "statedict()", '"statedict"'),
}


@pytest.mark.parametrize("checker", [pytest.param("mypy", marks=pytest.mark.long), "pyright"])
def test_type_checkers_find_each_mistake_and_nothing_else(library: Path, checker: str) -> None:
    """By an error in the line of the mistake. A checker takes all programs at once."""
    folder = library / checker
    folder.mkdir()
    (folder / "right.py").write_text(PROGRAM)
    expected = set()
    for what, (right, wrong, named) in MISTAKES.items():
        assert right in PROGRAM, what
        name = what.replace(" ", "_")
        (folder / f"{name}.py").write_text(PROGRAM.replace(right, wrong))
        expected.add((name, PROGRAM[: PROGRAM.index(right)].count("\n") + 1, named))
    config = {"typeCheckingMode": "strict", "extraPaths": [str(library)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", *CHECKERS[checker]],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = re.findall(r"(\w+)\.py:(\d+):.*\berror:((?:.*\n)(?:\s{4,}.*\n)*)", done.stdout)
    assert {(name, int(line)) for name, line, _ in found} == {one[:2] for one in expected}, (
        done.stdout
    )
    for name, line, named in expected:
        said = [text for *place, text in found if place == [name, str(line)]]
        assert any(named in text for text in said), done.stdout
