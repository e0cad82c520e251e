"""The blocks of the README and of each page run, pasted in order into an empty folder."""

import os
import re
import shlex
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
from programs.pasting import NOT_RUN, all_alike, blocks
from support import PROGRAMS, ROOT
from support.inside import _parser
from support.programs import PYTHON, QUIET

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Parsed, since the source distribution's setup.cfg has other spaces.
SETUP = ConfigParser()
SETUP.read_string((ROOT / "setup.cfg").read_text())
EXTRAS = dict(SETUP["options.extras_require"])
WITH_FRAMEWORKS = [
    "README",
    "augmentation",
    "command-line",
    "evaluation",
    "grain",
    "index",
    "jax",
    "keras",
    "keras-recipes",
    "tensorflow",
    "tensorflow-datasets",
]
# The first fork workers, the other chooses Keras's backend itself.
APART = [["migrating", "torch"], ["trainers"]]
PLAIN = [
    page.stem
    for page in PAGES
    if page.stem not in sum(APART, WITH_FRAMEWORKS) and any(block.runs() for block in blocks(page))
]


def paste(names: list[str], folder: Path, python: str = sys.executable) -> None:
    pages = {page.stem: str(page) for page in PAGES}
    done = subprocess.run(
        [python, PROGRAMS / "pasting.py", folder, *map(pages.get, names)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"} | QUIET,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_pages_without_framework_run(tmp_path: Path) -> None:
    assert {"concepts", "samplers", "streams"} <= set(PLAIN)
    paste(PLAIN, tmp_path)


@pytest.mark.frameworks
@pytest.mark.parametrize(
    "pages",
    [pytest.param(some, marks=pytest.mark.long) for some in (WITH_FRAMEWORKS, *APART)],
    ids=" ".join,
)
def test_pages_with_frameworks_run(pages: list[str], tmp_path: Path) -> None:
    paste(pages, tmp_path, python=PYTHON)


def test_python_block_that_is_not_run_names_missing_package() -> None:
    brought = "".join(EXTRAS.values())
    for page in PAGES:
        for block in blocks(page):
            if block.language == "python" and not block.runs():
                compile(block.code, page.name, "exec")
                needed = NOT_RUN.match(block.code)[1]
                assert [name for name in needed.split(", ") if f"\n{name}>=" in brought] == []


def test_shell_block_that_is_not_run_is_an_installation() -> None:
    """.ci/run runs those of the README, and the extras of the others are there."""
    for page in PAGES:
        for block in blocks(page):
            if block.language == "sh" and not block.runs():
                assert re.match("pip install |python3 -m venv ", block.code), page
                named = re.findall(r"\[([a-z,]+)\]", block.code)
                assert set(",".join(named).split(",")) <= {*EXTRAS, ""}, page


def test_console_blocks_have_valid_options() -> None:
    """The commands of a `console` block are not run, but each of their options exists."""
    for page in [*PAGES, *(ROOT / "docs" / "stories").glob("*.md")]:
        for console in re.findall(
            r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            for command in re.findall(r"^\$ twinfeed (.*)", console, re.MULTILINE):
                _parser().parse_args(shlex.split(command))


def test_code_is_in_blocks_of_known_language() -> None:
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert re.findall(r"\n\n    \S.*", text) == [], page
        languages = re.findall(r"^```(\w+)$", page.read_text(), re.MULTILINE)
        assert set(languages) <= {"python", "sh", "text", "console", "json"}, page


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("batch_size", "migrating"),
        ("buffer_size", "samplers"),
        ("collate_fn", "migrating"),
        ("dataset", "migrating"),
        ("class_weight", "keras-recipes"),
        ("drop_last", "migrating"),
        ("epoch size", "samplers"),
        ("loss spike", "troubleshooting"),
        ("min_after_dequeue", "migrating"),
        ("mixed precision", "keras-recipes"),
        ("nan", "troubleshooting"),
        ("num_workers", "migrating"),
        ("patches", "samplers"),
        ("pin_memory", "migrating"),
        ("pixels", "migrating"),
        ("read_up_to", "migrating"),
        ("sample_weight", "keras-recipes"),
        ("sampler", "samplers"),
        ("shuffle_batch", "migrating"),
        ("shuffl", "shuffling"),
        ("string_input_producer", "migrating"),
        ("tfds", "migrating"),
    ],
)
def test_heading_has_search_word(word: str, page: str) -> None:
    """Headings come first in what the site's search finds."""
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE)
    assert any(word in heading.lower() for heading in headings)


def test_first_page_opens_with_loader_of_reader_and_installation() -> None:
    opening = (ROOT / "docs" / "index.md").read_text().split("\n## ")[0]
    code = dict(re.findall(r"^```(\w+)\n(.*?)^```", opening, re.MULTILINE | re.DOTALL))
    assert "DataLoader(dataset, batch_size=64, sampler=" in code["python"]
    assert code["sh"].startswith("pip install ")


@pytest.mark.parametrize("page", ["README.md", "docs/migrating.md", "docs/samplers.md"])
def test_name_of_sampler_that_begins_table_cell_is_link(page: str) -> None:
    text = (ROOT / page).read_text().split("\n## Changes while training")[0]
    assert re.findall(r"^\| .* \| (`(?!Distributed)\w+Sampler\b.*)$", text, re.MULTILINE) == []


def test_comparison_of_outputs_ignores_timings_alone() -> None:
    assert all_alike("recall 93.9% of 732, 12.5 s", "recall 94.2% of 732, 1.0 s")
    assert not all_alike("recall 93.9% of 731, 12.5 s", "recall 94.2% of 732, 1.0 s")
    assert not all_alike("recall 53.9% of 732", "recall 94.2% of 732")
    assert all_alike("by 2e-07 at most", "by 5e-07 at most")
    assert not all_alike("by 2e-03 at most", "by 5e-07 at most")
    assert all_alike("held 970 MB of 7", "held 51 MB of 7")
    assert not all_alike("held 51 MB of 8", "held 51 MB of 7")
    assert not all_alike("one line\n", "one line\nanother\n")
