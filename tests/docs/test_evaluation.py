"""The programs of the page on evaluation: on any ranks, the results of one process."""

import re
from pathlib import Path

import pytest
from support import ROOT
from support.programs import EXAMPLES, run

PAGE = (ROOT / "docs" / "evaluation.md").read_text()
FOLDER = EXAMPLES / "evaluation"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "records")
BY_TORCHRUN = [name for name in PROGRAMS if name != "keras_evaluate"]  # it has two replicas


@pytest.mark.frameworks
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *((name, 2) for name in BY_TORCHRUN),
        *((name, None) for name in PROGRAMS),
    ],
)
def test_evaluation_examples_have_results_of_one_process(
    name: str, ranks: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And print the figures of the page, if it has some, on each rank."""
    monkeypatch.chdir(tmp_path)
    printed = run(FOLDER / f"{name}.py", ranks=ranks)
    assert printed.count(": that of one process") >= (ranks or 1)
    assert "NOT that" not in printed
    (section,) = [part for part in PAGE.split("\n## ") if f"evaluation/{name}.py" in part]
    for text in re.findall(r"```text\n(.*?)```", section, re.DOTALL):
        for line in text.splitlines():
            assert printed.count(line) >= (ranks or 1), line


def test_page_of_evaluation_shows_every_program() -> None:
    assert set(re.findall(r"examples/evaluation/(\w+)\.py", PAGE)) == {*PROGRAMS, "records"}
