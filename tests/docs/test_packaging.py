"""The wheel and the source distribution hold what they should, and install."""

import email
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from support import ROOT

# What a checkout holds beside its sources.
TRACES = (".*", "__pycache__", "*.egg-info", "PKG-INFO", "build", "dist", "*-data")

Installed = Callable[[str], Path]
"""Give the environment of a way to install."""


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


def sources(folder: str) -> set[str]:
    """The files of a folder that a wheel has: modules, stubs, and the mark of types."""
    place = "twinfeed" if folder == "package" else f"twinfeed/{folder}"
    kept = {path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".pyi")}
    return {f"{place}/{path.relative_to(ROOT / folder)}" for path in kept} | {f"{place}/py.typed"}


def test_the_wheel_holds_exactly_the_packages(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == sources("package") | sources("samplers") | sources("loaders")


def test_the_sdist_holds_every_file_of_the_sources(source: Path, built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {str(p.relative_to(source)) for p in source.rglob("*") if p.is_file()} <= names
    assert not any("__pycache__" in name for name in names)


ZIPPED = """
import sys
sys.path.insert(0, sys.argv[1])
import twinfeed
from twinfeed.loaders import Feed, NumpyLoader, pack
index = pack([{"x": b"1", "label": n % 3} for n in range(9)], sys.argv[2])["data"]
batches = list(NumpyLoader(Feed(index, twinfeed.PKBatchSampler(index.labels, p=2, k=2, seed=0))))
print(twinfeed.__file__, len(batches))
"""


def test_wheel_imports_from_zip_in_any_default_encoding(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    command = [sys.executable, "-X", "warn_default_encoding", "-W", "error", "-c", ZIPPED]
    done = subprocess.run([*command, wheel, tmp_path], capture_output=True, text=True, check=False)
    assert done.stdout == f"{wheel}/twinfeed/__init__.py 2\n", done.stderr


LOOK = """
import pickle, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import twinfeed
from twinfeed import PKBatchSampler
if __name__ == "__main__":
    sampler = PKBatchSampler([0, 0, 1, 1], p=2, k=2, seed=0)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert pool.submit(sampler.batch, 0, 0).result().tolist() == sampler.batch(0, 0).tolist()
    assert pickle.loads(pickle.dumps(sampler)).seed == 0
    print(twinfeed.__version__, twinfeed.__file__, sys.modules[PKBatchSampler.__module__].__file__)
"""


@pytest.fixture(scope="module")
def installed(built: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Make an environment with an installed library, over what is installed here already."""

    @cache
    def install(way: str) -> Path:
        place = tmp_path_factory.mktemp(way)
        venv.create(place, with_pip=False)
        what = {"wheel": "*.whl", "sdist": "*.tar.gz"}.get(way)
        path = next(built.glob(what)) if what else source
        python = place / "bin" / "python"
        (packages,) = place.glob("lib/*/site-packages")
        (packages / "others.pth").write_text(
            f"import site; site.addsitedir({str(Path(pytest.__file__).parent.parent)!r})\n"
        )
        pip = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
        options = {
            "editable": ["-e"],
            "strict": ["--config-settings", "editable_mode=strict", "-e"],
        }
        pip += ["--force-reinstall", *options.get(way, []), path]
        subprocess.run(pip, check=True, cwd=place, capture_output=True)
        return place

    return install


@pytest.mark.long
def test_wheel_sdist_and_folder_install_equal_files(
    installed: Installed,
) -> None:
    def files(way: str) -> dict[str, bytes]:
        (packages,) = installed(way).glob("lib/*/site-packages")
        found = {str(path.relative_to(packages)): path for path in packages.glob("twinfeed*/**/*")}
        return {
            name: path.read_bytes()
            for name, path in found.items()
            if path.is_file() and not name.endswith((".pyc", "/RECORD", "/direct_url.json"))
        }

    wheel = files("wheel")
    assert "twinfeed/samplers/__init__.py" in wheel
    assert files("sdist") == wheel
    assert files("plain") == wheel


@pytest.mark.parametrize(
    ("way", "where"),
    [
        ("wheel", "in the clone"),
        *(
            pytest.param(way, where, marks=pytest.mark.long)
            for way, where in (
                ("wheel", "elsewhere"),
                ("wheel", "beside the clone"),
                ("editable", "beside the clone"),
                ("editable", "elsewhere"),
                ("editable", "in the clone"),
            )
        ),
    ],
)
def test_the_installed_library_is_what_is_imported(
    installed: Installed, source: Path, tmp_path: Path, way: str, where: str
) -> None:
    """Also with a clone named twinfeed in the current folder; or the import says so."""
    folder = {"elsewhere": tmp_path, "in the clone": source, "beside the clone": source.parent}
    script = tmp_path / "look.py"
    script.write_text(LOOK)
    place, editable = installed(way), way == "editable"
    home = source if editable else place
    for words in ([script], ["-c", "import look"], ["-m", "twinfeed", "--help"]):
        path = "" if words[0] == "-m" else str(tmp_path)
        run = subprocess.run(
            [place / "bin" / "python", *words],
            env={"PYTHONPATH": path},
            cwd=folder[where],
            capture_output=True,
            text=True,
            check=False,
        )
        # Beside the clone, its folder may be all that Python finds.
        assert run.returncode == 0 or (editable and where == "beside the clone"), run.stderr
        if run.returncode:
            assert "twinfeed" in run.stderr.splitlines()[-1]
        elif words[0] == script:
            version, *files = run.stdout.split()
            assert version == metadata.version("twinfeed")
            assert all(Path(file).is_relative_to(home) for file in files), files
        else:
            assert "error" not in run.stderr.lower()


@pytest.mark.long
@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_type_checker_follows_strict_editable_installation(
    installed: Installed, tmp_path: Path, checker: str
) -> None:
    """As docs/install.md says: else it finds no twinfeed, and no mistake."""
    program = tmp_path / "program.py"
    program.write_text(
        "from twinfeed import BatchSampler, RandomSampler\n"
        "BatchSampler(RandomSampler(9, seed=0), batchsize=3)\n"
    )
    python = installed("strict") / "bin" / "python"
    options = ["--pythonpath", str(python)] if checker == "basedpyright" else []
    run = subprocess.run(
        [python, "-m", checker, *options, program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert '"batchsize"' in run.stdout, run.stdout + run.stderr


def test_wheel_description_has_only_absolute_links(
    built: Path,
) -> None:
    (wheel,) = built.glob("*.whl")
    (name,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA")]
    described = email.message_from_bytes(zipfile.ZipFile(wheel).read(name))
    text = str(described.get_payload())
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert [target for target in targets if not target.startswith("https://")] == []
    assert "![" not in text
    assert "One seed, one stream of batches" in text
    assert "## How to report" in text
    assert described["Description-Content-Type"] == "text/markdown"


def test_build_requires_no_exact_setuptools_version() -> None:
    """A distribution builds with the setuptools that it has; the pin is in the constraints."""
    wanted = re.findall(r"setuptools([^\"\n]*)", (ROOT / "pyproject.toml").read_text())[0]
    assert re.fullmatch(r">=[\d.]+", wanted)
    assert f"setuptools{wanted}\n" in (ROOT / "setup.cfg").read_text()
    assert re.search("^setuptools==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


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
