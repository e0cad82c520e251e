"""Some cases of each target of the fuzzer, and every case that once failed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from faults.fuzz.fuzz import FOUND, TARGETS, run, workshop

EACH = 50
SLOW = {"part": 10, "labels": 20, "image": 10, "cache": 20, "url": 20}


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """The fuzzer names a store in the environment, which later tests must not see."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ |= before


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.long)])
def test_mutations_raise_only_documented_errors(target: str, half: int) -> None:
    cases = [f"{target}:{number}" for number in range(half, SLOW.get(target, EACH), 2)]
    with workshop() as corpus:
        found = {case: problem for case in cases if (problem := run(corpus, case))}
    assert not found


def test_earlier_findings_stay_fixed() -> None:
    with workshop() as corpus:
        found = {case: problem for case in FOUND if (problem := run(corpus, case))}
    assert not found


def test_fuzzer_reports_undocumented_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "state", lambda *_: str(0)[1])
    with workshop() as corpus:
        assert "IndexError" in (run(corpus, "state:0") or "")
