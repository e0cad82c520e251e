"""A program of a user passes a strict type checker, and with a mistake in it does not."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = (ROOT / "tests" / "downstream" / "training.py").read_text()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library as an ordinary installation lays it out; an editable one has no types."""
    folder = tmp_path_factory.mktemp("types")
    shutil.copytree(ROOT / "package", folder / "twinfeed")
    for package in ("samplers", "loaders"):
        shutil.copytree(ROOT / package, folder / "twinfeed" / package)
    return folder


CHECKERS = {
    "mypy": ["mypy", "--strict", "--follow-imports=silent", "training.py"],
    "pyright": ["basedpyright", "--pythonpath", sys.executable, "training.py"],
}


def checked(library: Path, program: str, checker: str) -> tuple[set[int], str]:
    """Return the lines in which a strict type checker finds errors, and all that it says."""
    folder = library / "program"
    folder.mkdir(exist_ok=True)
    (folder / "training.py").write_text(program)
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
    assert done.returncode in (0, 1), done.stdout + done.stderr
    lines = re.findall(r"training\.py:(\d+):.*\berror:", done.stdout)
    return set(map(int, lines)), done.stdout


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_program_without_mistakes_passes(library: Path, checker: str) -> None:
    lines, said = checked(library, PROGRAM, checker)
    assert lines == set(), said


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


@pytest.mark.parametrize("checker", CHECKERS)
def test_each_mistake_is_found(library: Path, checker: str) -> None:
    """By an error in the line of the mistake."""
    for what, (right, wrong, named) in MISTAKES.items():
        assert right in PROGRAM, what
        lines, said = checked(library, PROGRAM.replace(right, wrong), checker)
        assert lines == {PROGRAM[: PROGRAM.index(right)].count("\n") + 1}, (what, said)
        assert named in said, (what, said)
