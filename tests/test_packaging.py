"""The wheel and the source distribution hold what they should, and install."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist, built from the files that git tracks."""
    source = tmp_path_factory.mktemp("source")
    tracked = subprocess.run(
        ["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True
    )
    for name in tracked.stdout.splitlines():
        if (ROOT / name).is_file():
            copy = source / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source]
    subprocess.run(command, check=True, capture_output=True)
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


def test_the_sdist_builds_what_the_checkout_builds(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.cfg", "pyproject.toml", "LICENSE", "README.md"} <= names
    assert {name.removeprefix("twinfeed/") for name in sources("samplers")} <= names


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
