"""The wheel and the source distribution hold what they should, and install."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What a checkout holds beside its sources.
TRACES = (".*", "__pycache__", "*.egg-info", "PKG-INFO", "build", "dist", "*-data")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, without the traces of earlier builds."""
    copy = tmp_path_factory.mktemp("source") / "twinfeed"
    return Path(shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*TRACES)))


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of the sources, and the wheel that the sdist makes."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def sources(package: str) -> set[str]:
    kept = {path for path in (ROOT / package).rglob("*") if path.suffix == ".py"}
    return {f"twinfeed/{path.relative_to(ROOT)}" for path in kept} | {
        f"twinfeed/{package}/py.typed"
    }


def test_the_wheel_holds_exactly_the_packages(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == sources("samplers") | sources("loaders")


def test_the_sdist_holds_every_file_of_the_sources(source: Path, built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {str(p.relative_to(source)) for p in source.rglob("*") if p.is_file()} <= names
    assert not any("__pycache__" in name for name in names)


def test_an_installed_wheel_works_from_anywhere(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path, wheel]
    subprocess.run(pip, check=True)
    code = "import twinfeed.samplers as s, twinfeed.loaders as l; print(s.__file__, l.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(name.startswith(str(tmp_path)) for name in done.stdout.split())


def test_every_pinned_version_but_torch_has_its_hashes() -> None:
    def names(text: str) -> dict[str, str]:
        found = re.findall(r"^([\w.-]+)==([^\s\\]+)", text, re.MULTILINE)
        return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}

    pinned = names((ROOT / "constraints.txt").read_text())
    hashed = (ROOT / "hashes.txt").read_text()
    assert names(hashed) == {name: pinned[name] for name in pinned if name != "torch"}
    parts = re.split(r"^(?=[\w.-]+==)", hashed, flags=re.MULTILINE)[1:]
    assert len(parts) == len(pinned) - 1
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", part) for part in parts)
