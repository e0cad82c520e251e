"""The report of a pass: every stage has its time, and waiting differs from making."""

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from support.shards import tfrecords

from twinfeed.loaders import Feed, Index, NumpyLoader, build_index
from twinfeed.loaders.batches import meter as _meter
from twinfeed.loaders.batches.meter import Meter, PassReport
from twinfeed.samplers import BatchSampler, ExactOnceBatchSampler, RandomSampler, ReuseSampler


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    folder = tmp_path_factory.mktemp("report")
    return build_index(tfrecords(folder, shards=2, each=10), folder / "x.index")


def size(sample: dict[str, Any]) -> dict[str, Any]:
    return {"size": len(sample["image"])}


def feed(index: Index, **options: Any) -> Feed:
    return Feed(index, ExactOnceBatchSampler(20, batch_size=5), **options)


class Clock:
    """A clock that tests move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        monkeypatch.setattr(_meter, "perf_counter_ns", lambda: self.now)

    def passes(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


def test_report_separates_waiting_from_making(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step waits 2 of 3 seconds, the second 0.6 of 5, and the third 1 of 10."""
    clock = Clock(monkeypatch)
    meter = Meter()
    meter.start()
    clock.passes(1)
    asked = clock.now
    meter.timed("reading", clock.passes, 1.5)
    clock.passes(0.5)
    meter.received(asked)
    assert meter.report().first == 2
    clock.passes(4.4)
    asked = clock.now
    clock.passes(0.6)
    meter.received(asked)
    clock.passes(9)
    asked = clock.now
    meter.timed("collating", clock.passes, 1)
    meter.received(asked)
    assert meter.report() == PassReport(
        batches=3,
        seconds=18.0,
        reading=1.5,
        collating=1.0,
        waiting=pytest.approx(3.6),
        first=pytest.approx(2),
    )
    assert str(meter.report()).splitlines()[1] == (
        "  the loop waited 3.6 s, 20% of the time, 2.0 s of it for the first batch: "
        "only the first batch holds it back"
    )


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (
            PassReport(9, 0.407, waiting=0.0015, first=0.001),
            "1.5 ms, 0% of the time, 1.0 ms of it for the first batch: data do not hold it back",
        ),
        (
            PassReport(12, 26.6, waiting=25.5, first=25.4),
            "25.5 s, 96% of the time, 25.4 s of it for the first batch: "
            "only the first batch holds it back",
        ),
        (
            PassReport(12, 26.6, waiting=25.5, first=2.4),
            "25.5 s, 96% of the time, 2.4 s of it for the first batch: data hold it back",
        ),
    ],
)
def test_verdict_is_by_time(report: PassReport, line: str) -> None:
    """It was by the number of steps that waited: a short pass seemed slow, a slow start did not."""
    assert str(report).splitlines()[1] == f"  the loop waited {line}"


def test_failing_stage_is_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    meter = Meter()

    def fail() -> None:
        clock.passes(2)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        meter.timed("decoding", fail)
    assert meter.report().decoding == 2


@pytest.mark.parametrize("threads", [0, 2])
def test_every_stage_of_a_pass_is_timed(index: Index, threads: int) -> None:
    fed = feed(index, decode=size, transform=dict)
    with NumpyLoader(fed, threads=threads) as loader:
        list(loader)
        report = loader.report()
    stages = report.reading, report.decoding, report.transforming, report.collating
    assert all(taken > 0 for taken in (*stages, report.waiting, report.first))


def test_decoding_ahead_is_timed(index: Index) -> None:
    stream = BatchSampler(ReuseSampler(20, reuse=2, live=10, seed=0), batch_size=5)
    with NumpyLoader(Feed(index, stream, decode=size, transform=dict), threads=2) as loader:
        list(loader)
        report = loader.report()
    assert report.batches == 8
    assert min(report.reading, report.decoding, report.transforming) > 0


def test_each_pass_has_its_own_report(index: Index) -> None:
    fed = Feed(index, BatchSampler(RandomSampler(20, seed=0), batch_size=5))
    with NumpyLoader(fed) as loader:
        assert loader.report() == PassReport(waiting=0.0, first=0.0)
        list(loader)
        assert loader.report().batches == 4
        for _ in loader:
            break
        report = loader.report()
        assert report.batches == 1
        list(loader)
        assert loader.report().batches == 3
    assert json.loads(json.dumps(asdict(report)))["batches"] == 1
    assert str(report).startswith("1 batch in ")


def test_worker_times_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    there, here = Meter(), Meter()
    here.start()
    there.timed("decoding", clock.passes, 2)
    here.add(there.take())
    clock.passes(3)
    here.received(clock.now)
    assert here.report() == PassReport(1, 5.0, decoding=2.0, waiting=0.0, first=0.0)
    assert there.report().decoding == 0


def test_external_pass_reports_no_waiting() -> None:
    meter = Meter()
    meter.start()
    meter.end()
    meter.start_external()
    meter.count_batches(3)
    report = meter.report()
    assert (report.batches, report.waiting, report.first) == (3, None, None)
    assert "not known" in str(report)


def test_seeds_are_drawn_only_for_a_transform(index: Index) -> None:
    """Nothing else needs them."""
    plain = [request.seeds for request in feed(index).requests()]
    assert plain == [None] * 4
    drawn = [request.seeds for request in feed(index, transform=dict).requests()]
    sampler = ExactOnceBatchSampler(20, batch_size=5)
    assert all(np.array_equal(one, sampler.seeds(0, step)) for step, one in enumerate(drawn))
