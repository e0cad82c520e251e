"""Which package may import what, seen in fresh processes."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import twinfeed.loaders
import twinfeed.samplers

TESTS = Path(__file__).parent
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax"}
OPTIONAL = {
    "PIL",
    "simplejpeg",
    "tqdm",
    "fsspec",
    "urllib3",
    "webdataset",
    "matplotlib",
    "lightning",
}


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
        assert top in {*sys.stdlib_module_names, "numpy"} or name.startswith(
            ("twinfeed.samplers", "twinfeed.lazy")
        )


@pytest.mark.parametrize("path", files(twinfeed.loaders), ids=lambda path: path.name)
def test_only_a_backend_imports_its_framework(path: Path) -> None:
    used = {name.partition(".")[0] for name in imports(path)} & FRAMEWORKS
    allowed = {name: {name} for name in FRAMEWORKS}
    name = path.name if path.parent.name == "loaders" else path.parent.name
    assert used <= allowed.get(name, set())


# The rooms, floor by floor. A room imports from those on the floors below it, and from itself.
FLOORS = (
    ("samplers",),
    ("errors",),
    ("support",),
    ("formats", "remote"),
    ("index",),
    ("ahead", "building"),
    ("reading",),
    ("feed",),
    ("making",),
    ("loop", "packing"),
    ("jax", "keras", "tensorflow", "tools", "torch"),
    ("pictures",),
    ("command_line",),
    ("loaders", "__main__"),
)


def modules() -> dict[str, Path]:
    """Every module of the two packages and its file."""
    found = {}
    for package in (twinfeed.samplers, twinfeed.loaders):
        root = Path(package.__path__[0])
        for path in root.rglob("*.py"):
            parts = [package.__name__, *path.relative_to(root).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imported(module: str) -> set[str]:
    """The modules of this library that a module imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return found & MODULES.keys()


def room(module: str) -> str:
    """The room of a module."""
    _, package, *rest = module.split(".")
    return package if package == "samplers" or not rest else rest[0]


@pytest.mark.parametrize("module", MODULES)
def test_a_room_imports_from_the_floors_below(module: str) -> None:
    floor = {name: number for number, rooms in enumerate(FLOORS) for name in rooms}
    assert room(module) in floor, "give the module a room, and name it here"
    for other in imported(module):
        if room(other) != room(module):
            assert floor[room(other)] < floor[room(module)], other


def test_no_module_imports_itself_by_way_of_others() -> None:
    uses = {module: imported(module) for module in MODULES}
    while leaves := {module for module in uses if not uses[module] & uses.keys()}:
        for module in leaves:
            del uses[module]
    assert not uses


@pytest.mark.parametrize("module", MODULES)
def test_what_begins_with_an_underscore_is_private_to_its_folder(module: str) -> None:
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("twinfeed"):
            for alias in node.names:
                *folders, name = f"{node.module}.{alias.name}".split(".")
                hidden = next((n for n, part in enumerate(folders) if part.startswith("_")), None)
                if name.startswith("_") or hidden is not None:
                    home = ".".join(folders[:hidden])
                    assert home in (package, module) or package.startswith(f"{home}."), alias.name


@pytest.mark.parametrize(
    "path", [*files(twinfeed.samplers), *files(twinfeed.loaders)], ids=lambda path: path.name
)
def test_functions_are_short(path: Path) -> None:
    """At most 50 lines beside the docstring, and 10 parameters but for constructors."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            own = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                own -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            assert own <= 50, node.name
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            assert len(given) <= 10 or node.name == "__init__", node.name


PUBLIC = {"twinfeed", "twinfeed.samplers", "twinfeed.loaders", "twinfeed.testing"} | {
    f"twinfeed.loaders.{name}"
    for name in ("torch", "tensorflow", "jax", "keras", "pictures", "formats")
}


@pytest.mark.parametrize(
    "path", sorted(TESTS.glob("*.py")), ids=lambda path: path.name.removesuffix(".py")
)
def test_a_test_of_behaviour_uses_public_names(path: Path) -> None:
    """Those of the inside come from one file; the tests of a module lie at the module's path."""
    ours = {name for name in imports(path) if name.partition(".")[0] == "twinfeed"}
    assert path.name == "inside.py" or ours <= PUBLIC


def test_the_tests_of_a_module_lie_at_its_path() -> None:
    package = Path(twinfeed.loaders.__path__[0])
    for path in sorted(TESTS.glob("loaders/*/test_*.py")):
        assert (package / path.parent.relative_to(TESTS / "loaders")).is_dir()


def test_a_module_is_found_by_its_name() -> None:
    """Each name is of one file, but for the loaders, and for what each framework answers."""
    names = Counter(
        path.stem.lstrip("_")
        for package in (twinfeed.samplers, twinfeed.loaders)
        for path in files(package)
        if path.stem != "__init__"
    )
    assert {name for name, count in names.items() if count > 1} <= {"loader", "processes"}


@pytest.mark.parametrize(
    "folder",
    sorted({path.parent for one in (twinfeed.samplers, twinfeed.loaders) for path in files(one)}),
    ids=lambda folder: folder.name,
)
def test_a_folder_says_what_each_of_its_files_is_for(folder: Path) -> None:
    text = (folder / "__init__.py").read_text()
    names = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    assert {name for name in names if not re.search(rf"(?<!\w){name}", text)} == set()
