"""Where an extra is not installed, the error names the extra, in an environment that lacks all."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import twinfeed
import twinfeed.loaders
import twinfeed.samplers

ON = 'pip install "twinfeed[{}]"'


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an installation of twinfeed with what it must have, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    shutil.copytree(twinfeed.__path__[0], folder / "twinfeed")
    for package in (twinfeed.loaders, twinfeed.samplers):
        (folder / "twinfeed" / package.__name__[9:]).symlink_to(package.__path__[0])
    for name in ("numpy", "google_crc32c"):
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        package = Path(found.origin).parent
        for one in (package, package.parent / f"{name}.libs"):
            if one.exists():
                (folder / one.name).symlink_to(one)
    return folder


def run(bare: Path, code: str) -> str:
    """Run code there, and return the last line of its error."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": str(bare)},
        cwd=bare,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.splitlines()[-1]


MODULES = {
    "torch": ("torch", "torch"),
    "tensorflow": ("tensorflow", "tensorflow"),
    "grain": ("grain", "grain"),
    "jax": ("jax", "jax"),
    "keras": ("keras", "tensorflow"),
    "pictures": ("matplotlib", "pictures"),
}


@pytest.mark.parametrize("name", MODULES)
def test_import_error_names_the_extra(bare: Path, name: str) -> None:
    module, extra = MODULES[name]
    message = run(bare, f"import twinfeed.loaders.{name}")
    assert (
        message
        == f"ModuleNotFoundError: twinfeed.loaders.{name} needs {module}: {ON.format(extra)}"
    )


def test_decoders_of_images_name_their_extra_and_no_record(bare: Path) -> None:
    wanted = f"ModuleNotFoundError: DecodeImage needs PIL: {ON.format('images')}"
    assert run(bare, "import twinfeed.loaders as tl; tl.DecodeImage()") == wanted


def test_compare_names_the_extra_before_running(bare: Path) -> None:
    code = """
import twinfeed.loaders as tl, twinfeed.samplers as ts
index = tl.pack([{"txt": b"a"}], "compared")["data"]
tl.compare(tl.Feed(index, ts.ExactOnceBatchSampler(1, batch_size=1)))
"""
    message = f"ModuleNotFoundError: compare with backend 'torch' needs torch: {ON.format('torch')}"
    assert run(bare, code) == message
