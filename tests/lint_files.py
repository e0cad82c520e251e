"""What must hold of the files themselves; `python tests/lint_files.py` prints what does not.

A rule is a function that yields one sentence for each place where it is broken. No module of the
library is imported, so that every rule holds without a framework.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
FOLDERS = {"twinfeed": "package", "twinfeed.samplers": "samplers", "twinfeed.loaders": "loaders"}
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "grain", "webdataset"}

# The rooms, floor by floor. A room imports from those on the floors below it, and from itself.
FLOORS = (
    ("samplers",),
    ("errors",),
    ("support",),
    ("formats", "storage"),
    ("index",),
    ("building", "reading"),
    ("feed",),
    ("batches",),
    ("loop", "packing"),
    ("tools", *FRAMEWORKS),
    ("audit", "pictures"),
    ("command_line",),
    ("loaders", "__main__"),
)

PUBLIC = {"twinfeed", "twinfeed.samplers", "twinfeed.loaders", "twinfeed.testing"} | {
    f"twinfeed.loaders.{name}" for name in (*FRAMEWORKS, "pictures", "formats")
}

# Modules without a test of their own name: the folder, the test that covers them, their names.
COVERED = (
    (
        "samplers",
        "laws/test_samplers.py",
        "batch batch_stream batch_table coverage exact_once fair_batches mixture processes "
        "replacement reuse shard_shuffle step_schedule traits types views weighted",
    ),
    ("samplers", "laws/test_iteration.py", "id_sequence iteration"),
    ("samplers", "unit/samplers/test_class_order.py", "mapped"),
    ("samplers", "unit/samplers/test_label_lists.py", "label_arrays"),
    ("samplers", "unit/samplers/test_orders.py", "subset"),
    (
        "samplers/drawing",
        "unit/samplers/test_drawing.py",
        "batch_shape fifo_cache int_arrays prefix_sums random_words weighted_order",
    ),
    ("samplers/drawing", "unit/samplers/drawing/test_round_robin.py", "blocks"),
    ("samplers/drawing", "unit/samplers/test_orders.py", "interleave_schedule"),
    ("samplers", "unit/samplers/test_diagnostics.py", "verdict"),
    ("loaders", "faults/test_damage.py", "errors"),
    ("loaders", "backends/grain/test_grain.py", "grain"),
    ("loaders", "backends/webdataset/test_webdataset.py", "webdataset"),
    (
        "loaders/audit",
        "unit/loaders/audit/test_examination.py",
        "declared drawing isolation repeat_questions report stream_questions worlds",
    ),
    (
        "loaders/building",
        "unit/loaders/building/test_build.py",
        "classes field_buffer part_stats parts plan scan_shard writer",
    ),
    ("loaders/command_line", "cli/test_commands.py", "commands parser printing"),
    ("loaders/command_line", "cli/test_mistakes.py", "feeds"),
    ("loaders/feed", "unit/loaders/batches/test_feed.py", "arguments"),
    ("loaders/feed", "unit/loaders/batches/test_feed_seeds.py", "seeded"),
    ("loaders/feed", "unit/loaders/reading/prefetch/test_read_plan.py", "shuffling"),
    (
        "loaders/formats",
        "faults/test_bytes.py",
        "features records sniff tarheader tarkeys tarnumbers",
    ),
    ("loaders/formats", "unit/loaders/formats/test_example.py", "protobuf"),
    (
        "loaders/index",
        "unit/loaders/index/test_index.py",
        "arrays manifest open options paths",
    ),
    ("loaders/index", "unit/loaders/tools/test_planning.py", "sizes"),
    (
        "loaders/keras",
        "backends/keras/test_saves.py",
        "callback callback_list callback_states checkpoints data_adapter fit_arguments model",
    ),
    ("loaders/loop", "backends/keras/test_saves.py", "adapter"),
    ("loaders/loop", "unit/loaders/loop/test_loader.py", "numpy_loader record_state"),
    (
        "loaders/packing",
        "unit/loaders/packing/test_pack.py",
        "inputs sample_check shard_writer split",
    ),
    (
        "loaders/reading",
        "unit/loaders/reading/test_dataset_source.py",
        "arrow_datasets map_datasets",
    ),
    (
        "loaders/reading/prefetch",
        "unit/loaders/reading/test_prefetch.py",
        "block_uses chunk_cache",
    ),
    ("loaders/storage", "unit/loaders/reading/test_remote.py", "download request_pool retries"),
    ("loaders/storage", "unit/loaders/index/test_remote_index.py", "object_store"),
    ("loaders/storage", "unit/loaders/storage/test_url.py", "fsspec_store open_store store"),
    ("loaders/storage", "unit/loaders/storage/test_http.py", "http_connections"),
    ("loaders/support", "unit/loaders/packing/test_publish.py", "temporary"),
    ("loaders/support", "unit/loaders/reading/test_by_key.py", "csv_columns"),
    ("loaders/support", "unit/loaders/reading/test_dataset_source.py", "array_types"),
    ("loaders/support", "unit/loaders/index/test_index.py", "checks"),
    ("loaders/support", "unit/loaders/formats/test_tfrecord.py", "checksum"),
    ("loaders/support", "unit/loaders/reading/test_local.py", "closing"),
    ("loaders/support", "faults/test_bytes.py", "limits"),
    ("loaders/support", "cli/test_commands.py", "progress"),
    (
        "loaders/tensorflow",
        "backends/tensorflow/test_loader.py",
        "batch_source callbacks datasets device feed_datasets iterators layout "
        "original pipeline processes",
    ),
    ("loaders/tools", "unit/loaders/tools/test_compare.py", "backends"),
    ("loaders/torch", "backends/torch/test_workers.py", "copier dataset sharing"),
    ("loaders/torch", "laws/test_empty_batches.py", "empty_batch"),
)

Problems = Iterator[str]


def modules() -> dict[str, Path]:
    """Every module of the library and its file, but for the few of `package`."""
    found = {}
    for package in ("twinfeed.samplers", "twinfeed.loaders"):
        root = ROOT / FOLDERS[package]
        for path in sorted(root.rglob("*.py")):
            parts = [package, *path.relative_to(root).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def imported(module: str) -> set[str]:
    """The modules of this library that a module imports, wherever in the file."""
    found = set()
    for node in nodes(MODULES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return found & MODULES.keys()


def room(module: str) -> str:
    _, package, *rest = module.split(".")
    return package if package == "samplers" or not rest else rest[0]


def samplers_import_numpy_and_themselves() -> Problems:
    for module, path in MODULES.items():
        for name in imports(path) if room(module) == "samplers" else ():
            known = name.partition(".")[0] in {*sys.stdlib_module_names, "numpy"}
            if not known and not name.startswith(("twinfeed.samplers", "twinfeed.lazy")):
                yield f"{module} imports {name}"


def only_a_backend_imports_its_framework() -> Problems:
    for module, path in MODULES.items():
        used = {name.partition(".")[0] for name in imports(path)} & FRAMEWORKS
        if used - {room(module)}:
            yield f"{module} imports {used}"


def a_room_imports_from_the_floors_below() -> Problems:
    floor = {name: number for number, rooms in enumerate(FLOORS) for name in rooms}
    for module in MODULES:
        if room(module) not in floor:
            yield f"the room of {module} is not in FLOORS"
            continue
        for other in imported(module):
            if room(other) != room(module) and floor[room(other)] >= floor[room(module)]:
                yield f"{module} imports {other}, which is not below it"


def no_module_imports_itself_by_way_of_others() -> Problems:
    uses = {module: imported(module) for module in MODULES}
    while leaves := {module for module in uses if not uses[module] & uses.keys()}:
        for module in leaves:
            del uses[module]
    if uses:
        yield f"a circle of imports in {sorted(uses)}"


def what_begins_with_an_underscore_is_private_to_its_folder() -> Problems:
    for module, path in MODULES.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in nodes(path):
            if not isinstance(node, ast.ImportFrom) or "twinfeed" not in (node.module or ""):
                continue
            for alias in node.names:
                *folders, name = f"{node.module}.{alias.name}".split(".")
                hidden = next((n for n, part in enumerate(folders) if part.startswith("_")), None)
                home = ".".join(folders[:hidden])
                ours = home in (package, module) or package.startswith(f"{home}.")
                if (name.startswith("_") or hidden is not None) and not ours:
                    yield f"{module} imports {node.module}.{alias.name}"


@cache
def hidden_names(path: Path) -> tuple[set[str], set[str]]:
    """The underscored names that a file defines, and those it asks other objects for."""
    defined, asked = set(), set()
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute):
            whose = node.value.id if isinstance(node.value, ast.Name) else ""
            own = isinstance(node.ctx, ast.Store) or whose in ("self", "cls")
            (defined if own else asked).add(node.attr)
    return tuple({n for n in names if re.match("_[^_]", n)} for names in (defined, asked))


def what_begins_with_an_underscore_is_asked_of_objects_of_its_own_room_alone() -> Problems:
    """A subclass asks itself for what its base has."""
    defined: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        for name in hidden_names(path)[0]:
            defined.setdefault(name, set()).add(room(module))
    for module, path in MODULES.items():
        for name in hidden_names(path)[1] & defined.keys() - {"_replace"}:  # of named tuples
            if room(module) not in defined[name]:
                yield f"{module} asks an object of {sorted(defined[name])} for {name}"


def functions_are_short() -> Problems:
    """At most 50 lines beside the docstring, and 10 parameters but for constructors."""
    for module, path in MODULES.items():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef):
                own = (node.end_lineno or 0) - node.lineno + 1
                if ast.get_docstring(node) is not None:
                    own -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
                given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                if own > 50 or (len(given) > 10 and node.name != "__init__"):
                    yield f"{module}.{node.name} has {own} lines and {len(given)} parameters"


def a_test_of_behaviour_uses_public_names() -> Problems:
    """Those of the inside come from one file, or are used by the tests of their own module."""
    for path in sorted(TESTS.rglob("*.py")):
        may = path.name == "inside.py" or path.relative_to(TESTS).parts[0] in ("unit", "backends")
        ours = {name for name in imports(path) if name.partition(".")[0] == "twinfeed"}
        if not may and ours - PUBLIC:
            yield f"{path.relative_to(ROOT)} imports {ours - PUBLIC}"


def a_unit_test_is_named_after_a_module() -> Problems:
    """The tests of `loaders/a/_b.py` are in `tests/unit/loaders/a/test_b.py` or `test_b_….py`."""
    for path in sorted((TESTS / "unit").rglob("test_*.py")):
        folder = ROOT / path.parent.relative_to(TESTS / "unit")
        names = {module.stem.lstrip("_") for module in folder.iterdir()}  # folders too
        if not any(f"{path.stem}_".startswith(f"test_{name}_") for name in names):
            yield f"{path.relative_to(ROOT)} is of no module"


def every_module_has_a_test() -> Problems:
    """One of its name in unit/ or backends/, or the test that COVERED has for it."""
    tests = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    without_test = set()
    for path in MODULES.values():
        folder, name = path.parent.relative_to(ROOT).as_posix(), path.stem.lstrip("_")
        unit, backend = (
            f"unit/{folder}/test_{name}.py",
            f"backends/{path.parent.name}/test_{name}.py",
        )
        if path.stem != "__init__" and not {unit, backend} & tests:
            without_test.add(f"{folder}/{name}")
    covered = {f"{folder}/{name}" for folder, _, names in COVERED for name in names.split()}
    for module in sorted(without_test - covered):
        yield f"{module} has no test of its name, and is not in COVERED"
    for module in sorted(covered - without_test):
        yield f"COVERED has {module}, which has a test of its name, or is no module"
    for test in sorted({test for _, test, _ in COVERED} - tests):
        yield f"COVERED has {test}, which is no test"


def a_module_is_found_by_its_name() -> Problems:
    """Each name is of one file, but for the loaders, and for what each framework answers."""
    stems = [path.stem.lstrip("_") for path in MODULES.values() if path.stem != "__init__"]
    for name, count in Counter(stems).items():
        if count > 1 and name not in {"loader", "processes"}:
            yield f"{count} modules are named {name}"


# Words that had several meanings, or name no thing: the noun in their place can be guessed. No name
# has them, nor their plural, as a word; those of WHOLE are only refused as the whole name.
DIALECT = re.findall(
    r"\w+",
    "absent ahead apart begin begun fact given gone held lack lacking lane lap lent made making "
    "mine passed piece some spelled stand tell told turn",
)
WHOLE = re.findall(r"\w+", "alone each follow left met once one other place rest walk")
ALLOWED = {  # the halves of a Feistel network, a corner, Python's `__eq__`, public names
    ("samplers/drawing/permutation.py", "left"),
    ("loaders/feed/decode.py", "left"),
    ("loaders/index/arrays.py", "other"),
    ("loaders/building/bad_records.py", "rest"),
    ("loaders/index/options.py", "classes_given"),
    ("samplers/batch.py", "apart"),
    ("samplers/pk.py", "apart"),
}
NAMING = {  # the nodes that give a name, and the attribute that has it
    ast.FunctionDef: "name",
    ast.ClassDef: "name",
    ast.ExceptHandler: "name",
    ast.MatchAs: "name",
    ast.MatchStar: "name",
    ast.MatchMapping: "rest",
    ast.Name: "id",
    ast.Attribute: "attr",
    ast.alias: "asname",
    ast.arg: "arg",
}


def new_names(path: Path) -> set[str]:
    """Every name that a file gives: its own, and those of functions, variables, aliases, …."""
    names = {path.stem}
    for node in nodes(path):
        if type(node) in NAMING and not isinstance(getattr(node, "ctx", None), ast.Load):
            names.add(getattr(node, NAMING[type(node)]) or "")
    return names


def names_are_of_the_glossary() -> Problems:
    """No name is of the words of DIALECT, but for Keras's hooks, such as `on_epoch_begin`."""
    for path in [*MODULES.values(), *(ROOT / "package").glob("*.py")]:
        file = path.relative_to(ROOT).as_posix()
        for name in sorted(new_names(path)):
            words = re.findall("[A-Z]?[a-z]+|[A-Z]+", name)
            has_word = any(word.lower().removesuffix("s") in DIALECT for word in words)
            is_refused = has_word or name.strip("_").removesuffix("s") in WHOLE
            if is_refused and (file, name) not in ALLOWED and not name.startswith("on_"):
                yield f"{file} names something {name}: take a noun (CONTRIBUTING, Words)"


def a_docstring_says_what_the_object_is() -> Problems:
    """It begins with a noun phrase or an imperative, not with a question word."""
    question = re.compile(r'^ *"""((?:What|How|Where|When|Which|Why) .*)', re.MULTILINE)
    for path in [*MODULES.values(), *(ROOT / "package").glob("*.py")]:
        for found in question.findall(path.read_text()):
            yield f"{path.relative_to(ROOT)}: {found}"


def a_folder_says_what_each_of_its_files_is_for() -> Problems:
    for folder in sorted({path.parent for path in MODULES.values()}):
        text = (folder / "__init__.py").read_text()
        for name in sorted({path.name for path in folder.glob("*.py")} - {"__init__.py"}):
            if not re.search(rf"(?<!\w){name}", text):
                yield f"{folder.name}/__init__.py does not name {name}"


def errors_are_in_a_section() -> Problems:
    sentence = re.compile(r'(?:^ *|\. |""")Raises [A-Z].*', re.MULTILINE)
    for path in [*MODULES.values(), *(ROOT / "package").glob("*.py")]:
        for found in sentence.findall(path.read_text()):
            yield f"{path.name}: {found.strip()}"


@cache
def document(name: str) -> str:
    return (ROOT / name).read_text()


@cache
def tests_text() -> str:
    return "\n".join(path.read_text() for path in sorted(TESTS.rglob("*.py")))


@cache
def known_tests() -> set[str]:
    return {
        f"{path.relative_to(TESTS)}::{name}"
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }


def numbered(pattern: str, text: str) -> set[int]:
    return {int(number) for number in re.findall(pattern, text, re.MULTILINE)}


def cited_tests(text: str) -> set[str]:
    return set(re.findall(r"`([\w/]+\.py::test_\w+)`", text))


def every_fault_that_a_test_names_is_in_the_list() -> Problems:
    sections = re.split(r"^## ", document("docs/faults.md"), flags=re.MULTILINE)[1:]
    by_letter = {section[0].lower(): numbered(r"^\| (\d+) \|", section) for section in sections}
    for letters in re.findall(r"def test_((?:[a-g]\d\d_)+)", tests_text()):
        for letter, number in re.findall(r"([a-g])(\d\d)_", letters):
            if int(number) not in by_letter[letter]:
                yield f"a test names the fault {letter}{number}"
    for number in numbered(r"def test_fault_(\d+)_", tests_text()) - set().union(
        *by_letter.values()
    ):
        yield f"a test names the fault {number}"


def every_fault_has_a_number_and_a_test_of_its_own() -> Problems:
    """The test has the number in its name, or is named on the page."""
    listed = document("docs/faults.md")
    numbers = Counter(re.findall(r"^\| (\d+) \| [^`]", listed, re.MULTILINE))
    held = numbered(r"def test_fault_(\d+)_", tests_text())
    for letters in re.findall(r"def test_((?:[a-g]\d\d_)+)", tests_text()):
        held |= numbered(r"[a-g](\d\d)_", letters)
    for cases, tests in re.findall(r"^\| ([\d, ]+) \| (`\S+::test_.*) \|$", listed, re.MULTILINE):
        held |= numbered(r"(\d+)", cases)
        for name in cited_tests(tests) - known_tests():
            yield f"docs/faults.md names {name}"
    for number, count in numbers.items():
        if count > 1 or int(number) not in held:
            yield f"the fault {number} has {count} rows, and it may have no test"


def every_promise_of_security_is_held_by_a_test() -> Problems:
    text = document("SECURITY.md")
    promised = text[text.index("## What is promised") : text.index("## The tests of each")]
    table = dict(re.findall(r"^\| ([^|`]+) \| (`\S+::test_.*) \|$", text, re.MULTILINE))
    if list(table) != re.findall(r"^- \*\*(.+?)\.\*\*", promised, re.MULTILINE):
        yield "SECURITY.md: its promises and its table of tests differ"
    for promise, tests in table.items():
        if not cited_tests(tests) or cited_tests(tests) - known_tests():
            yield f"SECURITY.md, {promise}: {cited_tests(tests) - known_tests() or 'no test'}"


def every_law_that_a_test_cites_is_in_the_design() -> Problems:
    laws = numbered(r"^(\d+)\. \*", document("docs/design.md"))
    if laws != set(range(1, 16)):
        yield f"docs/design.md has the laws {sorted(laws)}"
    for number in numbered(r'"""Laws? (\d+)', tests_text()) - laws:
        yield f"a test cites the law {number}"


def links_between_documents_lead_somewhere() -> Problems:
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text()):
            if not (path.parent / target).exists():
                yield f"{path.name} leads to {target}"


def the_table_of_versions_is_that_of_the_requirements() -> Problems:
    floors = re.findall(r"^\s+([a-z0-9-]+)>=([\d.]+)", document("setup.cfg"), re.MULTILINE)
    pins = re.findall(r"^([\w.-]+)==(\S+)", document("constraints.txt"), re.MULTILINE)
    pinned = {name.replace("_", "-"): version for name, version in pins}
    table = r"^\| ([\w-]+) \| ([\d.]+) \| ([\d.]+) \|$"
    for name, oldest, tested in re.findall(table, document("docs/install.md"), re.MULTILINE):
        if (name, oldest) not in floors or pinned.get(name) != tested:
            yield f"docs/install.md: {name} is {pinned.get(name)}, or its oldest is not {oldest}"


RULES: tuple[Callable[[], Problems], ...] = (
    samplers_import_numpy_and_themselves,
    only_a_backend_imports_its_framework,
    a_room_imports_from_the_floors_below,
    no_module_imports_itself_by_way_of_others,
    what_begins_with_an_underscore_is_private_to_its_folder,
    what_begins_with_an_underscore_is_asked_of_objects_of_its_own_room_alone,
    functions_are_short,
    a_test_of_behaviour_uses_public_names,
    a_unit_test_is_named_after_a_module,
    every_module_has_a_test,
    a_module_is_found_by_its_name,
    names_are_of_the_glossary,
    a_docstring_says_what_the_object_is,
    a_folder_says_what_each_of_its_files_is_for,
    errors_are_in_a_section,
    every_fault_that_a_test_names_is_in_the_list,
    every_fault_has_a_number_and_a_test_of_its_own,
    every_promise_of_security_is_held_by_a_test,
    every_law_that_a_test_cites_is_in_the_design,
    links_between_documents_lead_somewhere,
    the_table_of_versions_is_that_of_the_requirements,
)


def broken() -> list[str]:
    """Every place where a rule is broken, after the rule's name."""
    return [f"{rule.__name__}: {problem}" for rule in RULES for problem in rule()]


if __name__ == "__main__":
    sys.exit("\n".join(broken()) or None)
