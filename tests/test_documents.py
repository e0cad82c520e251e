"""The documents for contributors hold what the tests cite."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = "\n".join(path.read_text() for path in sorted((ROOT / "tests").rglob("*.py")))


def numbered(pattern: str, text: str) -> set[int]:
    return {int(number) for number in re.findall(pattern, text, re.MULTILINE)}


def test_every_fault_that_names_a_test_is_in_the_list() -> None:
    listed = (ROOT / "docs" / "faults.md").read_text()
    sections = re.split(r"^## ", listed, flags=re.MULTILINE)[1:]
    by_letter = {section[0].lower(): numbered(r"^\| (\d+) \|", section) for section in sections}
    cited = re.findall(r"def test_(?:([a-g])\d\d_)*([a-g])(\d\d)_", TESTS)
    assert len(cited) > 30
    assert [name for name in cited if int(name[2]) not in by_letter[name[1]]] == []
    assert numbered(r"def test_fault_(\d+)_", TESTS) <= set().union(*by_letter.values())


def test_every_fault_has_a_number_of_its_own() -> None:
    listed = re.findall(
        r"^\| (\d+) \| [^`]", (ROOT / "docs" / "faults.md").read_text(), re.MULTILINE
    )
    assert len(listed) > 90
    assert [number for number in listed if listed.count(number) > 1] == []


def cited_tests(text: str) -> set[str]:
    return set(re.findall(r"`(test_\w+\.py::test_\w+)`", text))


def test_every_fault_is_held_by_a_test() -> None:
    """Which has its number in its name, or is named on the page, and is there."""
    listed = (ROOT / "docs" / "faults.md").read_text()
    named = numbered(r"def test_fault_(\d+)_", TESTS)
    for letters in re.findall(r"def test_((?:[a-g]\d\d_)+)", TESTS):
        named |= numbered(r"[a-g](\d\d)_", letters)
    for cases, tests in re.findall(r"^\| ([\d, ]+) \| (`test_.*) \|$", listed, re.MULTILINE):
        assert cited_tests(tests) <= known_tests()
        named |= numbered(r"(\d+)", cases)
    assert numbered(r"^\| (\d+) \| [^`]", listed) - named == set()


def test_every_promise_of_security_is_held_by_a_test() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    promised = text[text.index("## What is promised") : text.index("## The tests of each")]
    table = dict(re.findall(r"^\| ([^|`]+) \| (`test_.*) \|$", text, re.MULTILINE))
    assert list(table) == re.findall(r"^- \*\*(.+?)\.\*\*", promised, re.MULTILINE)
    for tests in table.values():
        assert cited_tests(tests)
        assert cited_tests(tests) <= known_tests()


def known_tests() -> set[str]:
    return {
        f"{path.name}::{name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }


def test_every_law_that_a_test_cites_is_in_the_design() -> None:
    laws = numbered(r"^(\d+)\. \*", (ROOT / "docs" / "design.md").read_text())
    assert laws == set(range(1, 16))
    assert numbered(r'"""Laws? (\d+)', TESTS) <= laws


def test_links_between_documents_lead_somewhere() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    for path in documents:
        targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text())
        assert [target for target in targets if not (path.parent / target).exists()] == [], path


def test_the_drawings_are_those_of_the_streams() -> None:
    spec = importlib.util.spec_from_file_location("drawings", ROOT / "docs" / "drawings.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, text in module.drawings().items():
        assert (ROOT / "docs" / name).read_text() == text, f"python docs/drawings.py writes {name}"
