"""The comparison finds nothing where there is nothing, and says what differs where it does."""

import math
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.own_backend import BOXES
from support.refusals import Call, Refused

from twinfeed.loaders import (
    BACKENDS,
    Backend,
    DecodeError,
    Feed,
    Index,
    LoaderError,
    compare,
    pack,
)
from twinfeed.samplers import BatchSampler, ExactOnceBatchSampler, RandomSampler

# The module of a backend, which only its own processes import.
NAME = "support.other_backend"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    samples = [{"word": b"x" * number, "label": number % 3} for number in range(20)]
    return pack(samples, tmp_path_factory.mktemp("words"))["data"]


def measure(sample: dict[str, Any]) -> dict[str, Any]:
    length = len(sample["word"])
    return {"size": np.float32(length), "ones": np.ones(length), "word": sample["word"]}


def decode_slightly_off(sample: dict[str, Any]) -> dict[str, Any]:
    """Decode otherwise in the processes of one backend."""
    found = measure(sample)
    return {
        **found,
        "size": found["size"] + np.float64(0.5 * (NAME in sys.modules and found["size"] > 9)),
    }


@pytest.mark.frameworks
def test_compare_finds_equal_batches_in_frameworks(index: Index) -> None:
    sampler = BatchSampler(RandomSampler(20, seed=1), batch_size=6)
    feed = Feed(index, sampler, decode=measure, collate={"ones": "ragged"})
    found = compare(feed, backends=["numpy", "torch", "tensorflow", "jax"], batches=6)
    assert found.ok, str(found)
    assert [run.records for run in found.runs] == [20 + 6 + 6] * 4
    assert all(run.rate > 0 and run.first > 0 and run.memory > 1 << 20 for run in found.runs)
    assert "word: the same" in str(found)


def test_compare_accepts_a_custom_backend(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "boxes", BOXES)
    sampler = ExactOnceBatchSampler(20, batch_size=5)
    feed = Feed(index, sampler, decode=measure, collate={"ones": "ragged"})
    found = compare(feed, backends=["numpy", "boxes"], batches=8)
    assert (found.ok, [run.backend for run in found.runs]) == (True, ["numpy", "boxes"])


def test_compare_warns_of_no_loader_of_its_own(recwarn: pytest.WarningsRecorder) -> None:
    """Each process makes several loaders of the feed, all from epoch 0 on."""
    feed = Feed({"x": np.arange(8)}, BatchSampler(RandomSampler(8, seed=0), batch_size=4))
    assert compare(feed, backends=["numpy", "numpy"]).ok
    assert "starts epoch 0 again" not in str([warning.message for warning in recwarn])


def add_sizes() -> Callable[[Mapping[str, Any]], float]:
    """A "model" that remembers, and whose last digits differ from backend to backend."""
    total = 0.0

    def step(batch: Mapping[str, Any]) -> float:
        nonlocal total
        total += float(batch["size"].sum()) + (NAME in sys.modules) / 4
        return total

    return step


def test_compare_measures_differences_and_losses_before_them(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS, "other", Backend(NAME, "NumpyLoader"))
    steps = [add_sizes] * 2
    backends: Any = ["numpy", "other"]
    sampler = ExactOnceBatchSampler(20, batch_size=5)
    feed = Feed(index, sampler, decode=measure, collate={"ones": "pad"})
    found = compare(feed, backends=backends, steps=steps)
    assert (found.first, found.loss_differences) == (None, (0, 1.0))
    assert found.runs[0].losses == (10, 45, 105, 190)
    assert [line.split()[-1] for line in str(found).splitlines()[:3]] == ["apart", "0", "1"]

    other = Feed(index, sampler, decode=decode_slightly_off, collate={"ones": "pad"})
    found = compare(other, backends=backends, steps=steps)
    assert (found.ok, found.differing, found.largest) == (False, {"size": [2, 3]}, {"size": 0.5})
    assert found.findings == ["size: differs in 2 of 4 batches, first in 2, by 0.5 at most"]
    assert found.findings[0] in str(found)
    assert str(found).startswith("backend         records/s  first batch  peak memory")
    assert (found.first, found.loss_differences) == (
        2,
        (0, 0.5),
    )  # the third step is of other inputs
    runs = [
        replace(run, losses=losses)
        for run, losses in zip(found.runs, [(1,), (math.nan,)], strict=False)
    ]
    assert math.isnan(replace(found, runs=tuple(runs)).loss_differences[1])
    assert replace(found, runs=tuple(runs), differing={"size": [0]}).loss_differences == (
        None,
        None,
    )


def return_nothing() -> None:
    """A function of `steps` that returns nothing."""


def fails(sample: dict[str, Any]) -> dict[str, Any]:
    if len(sample["word"]) == 7:
        raise RuntimeError("seven")
    return measure(sample)


def call(tool: Callable[..., object], decode: Any = measure, **options: Any) -> Call:
    sampler = ExactOnceBatchSampler(20, batch_size=5)
    return lambda index: tool(Feed(index, sampler, decode=decode, collate="ragged"), **options)


REFUSED: Refused = [
    (call(compare, backends=["torch"]), ValueError, "at least two of numpy, torch, tensorflow"),
    (call(compare, backends=["numpy", "absent"]), ModuleNotFoundError, "'absent' needs mxnet"),
    *(
        (
            call(compare, backends=[name] * 2),
            kind,
            problem,
        )
        for name, kind, problem in (
            ("gone", ModuleNotFoundError, "No module named 'support.own_backend.gone'"),
            ("other", AttributeError, "module 'support.own_backend' has no attribute 'Other'"),
        )
    ),
    *(
        (call(compare, steps=steps), ValueError, r"must be a list of 2 functions, one per .*, got")
        for steps in ([add_sizes], 2, {"torch": add_sizes, "jax": add_sizes}, ["torch", "jax"])
    ),
    (call(compare, batches="2"), TypeError, "batches must be an integer, got '2'"),
    (compare, TypeError, r"feed must be Feed\(index, sampler\), got Index"),  # type: ignore[arg-type]
    (
        call(compare, lambda sample: sample, backends=["numpy"] * 2),
        LoaderError,
        "define the functions that you pass",
    ),
    (call(compare, fails, backends=["numpy"] * 2), DecodeError, "(?s)record 7.*in backend 'numpy'"),
    (call(compare, steps=[return_nothing] * 2, backends=["numpy"] * 2), TypeError, "not callable"),
]


def test_compare_refuses_bad_arguments(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "absent", BOXES._replace(needs="mxnet"))
    monkeypatch.setitem(BACKENDS, "gone", BOXES._replace(module="support.own_backend.gone"))
    monkeypatch.setitem(BACKENDS, "other", BOXES._replace(loader="Other"))
    for refused, kind, word in REFUSED:
        with pytest.raises(kind, match=word):
            refused(index)


def test_compare_refuses_script_without_main_guard(index: Index) -> None:
    code = f"""if True:
        from twinfeed.loaders import Feed, compare, open_index
        from twinfeed.samplers import ExactOnceBatchSampler
        def decode(sample):
            return sample
        index = open_index({str(index.path)!r})
        feed = Feed(index, ExactOnceBatchSampler(20, batch_size=5), decode=decode)
        compare(feed, backends=["numpy", "numpy"])
    """
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "WorkerDiedError: a worker process ended" in done.stderr
    assert "what to do: define the functions that you pass in a module" in done.stderr


def test_compare_of_one_batch_has_no_rate(tmp_path: Path) -> None:
    index = pack([{"x": 1}], tmp_path)["data"]
    found = compare(Feed(index, ExactOnceBatchSampler(1, batch_size=1)), backends=["numpy"] * 2)
    assert [run.rate for run in found.runs] == [None, None]
    assert "0/s" not in str(found)
    assert re.search(r"numpy +- ", str(found))
