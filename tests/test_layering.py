"""Which package may import what, seen in fresh processes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import twinfeed.loaders
import twinfeed.samplers

FRAMEWORKS = {"torch", "tensorflow", "keras", "jax"}
OPTIONAL = {"PIL", "simplejpeg", "tqdm", "fsspec", "webdataset", "matplotlib", "lightning"}


def loaded_by(module: str) -> set[str]:
    """The top-level packages that importing `module` loads."""
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def third_party(names: set[str]) -> set[str]:
    private = {name for name in names if name.startswith("_")}
    return names - set(sys.stdlib_module_names) - private - {"twinfeed", "sitecustomize"}


def test_samplers_cost_numpy_and_nothing_more() -> None:
    assert third_party(loaded_by("twinfeed.samplers")) <= third_party(loaded_by("numpy"))


def test_loaders_load_no_framework_and_no_extra() -> None:
    loaded = loaded_by("twinfeed.loaders")
    assert not loaded & (FRAMEWORKS | OPTIONAL)
    assert third_party(loaded) <= third_party(loaded_by("numpy")) | {"google_crc32c"}


@pytest.mark.frameworks
@pytest.mark.parametrize(("backend", "other"), [("torch", "tensorflow"), ("tensorflow", "torch")])
def test_a_backend_does_without_the_other(backend: str, other: str) -> None:
    assert other not in loaded_by(f"twinfeed.loaders.{backend}")


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def files(package: object) -> list[Path]:
    return sorted(Path(package.__path__[0]).rglob("*.py"))  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", files(twinfeed.samplers), ids=lambda path: path.name)
def test_samplers_import_numpy_and_themselves(path: Path) -> None:
    for name in imports(path):
        top = name.partition(".")[0]
        assert top in {*sys.stdlib_module_names, "numpy"} or name.startswith("twinfeed.samplers")


@pytest.mark.parametrize("path", files(twinfeed.loaders), ids=lambda path: path.name)
def test_only_a_backend_imports_its_framework(path: Path) -> None:
    used = {name.partition(".")[0] for name in imports(path)} & FRAMEWORKS
    allowed = {"torch": {"torch"}, "tensorflow": {"tensorflow"}, "keras.py": {"keras"}}
    name = path.name if path.parent.name == "loaders" else path.parent.name
    assert used <= allowed.get(name, set())


# Each package of the loaders, and those of the others that it may import.
BELOW: dict[str, set[str]] = {
    "formats": set(),
    "index": {"formats"},
    "reading": {"formats", "index"},
    "packing": {"formats", "index", "reading"},
    "torch": {"index", "reading"},
    "tensorflow": {"formats", "index", "reading"},
    "command_line": {"formats", "index", "packing", "reading"},
}


@pytest.mark.parametrize("package", BELOW)
def test_packages_of_the_loaders_import_those_below(package: str) -> None:
    for path in Path(twinfeed.loaders.__path__[0], package).glob("*.py"):
        parts = {name.removeprefix("twinfeed.loaders.").partition(".")[0] for name in imports(path)}
        assert parts & BELOW.keys() <= BELOW[package] | {package}, path.name
