"""Feed: what decode and transform are called with, and what its batches depend on."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.feeds import batch_of, measure, request_of
from support.inside import batcher_of

from twinfeed.loaders import (
    DecodeError,
    Feed,
    FieldSpec,
    Index,
    pack,
)
from twinfeed.loaders.reading.prefetch.schedule import Request
from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
)


def test_transform_receives_sample_columns_ids_and_seeds(
    index: Index, sampler: ExactOnceBatchSampler
) -> None:
    samples = []

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        samples.append(sample)
        return sample

    side = {"weight": np.arange(6, dtype=np.float32) / 2}
    feed = Feed(index, sampler, decode=measure, transform=transform, side=side)
    assert feed.spec
    samples.clear()
    batch = batch_of(feed, request_of(3, 1, views=(0, 7)))
    assert len(samples) == 2
    assert samples[1] == {
        "size": 2, "label": 1, "weight": 0.5,
        "id": 1, "record": 1, "view": 7, "seed": 1, "seed32": 1,
    }  # fmt: skip
    assert sorted(batch) == ["id", "label", "size", "weight"]
    assert batch["weight"].tolist() == [1.5, 0.5]


def test_transform_runs_for_every_sample_of_a_repeated_record(
    index: Index, sampler: ExactOnceBatchSampler
) -> None:
    feed = Feed(index, sampler, transform=lambda sample: {"seed_plus_one": sample["seed"] + 1})
    assert batch_of(feed, request_of(2, 2, 2))["seed_plus_one"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("what", ["decode", "transform"])
def test_failing_callable_names_the_record(
    index: Index, sampler: ExactOnceBatchSampler, what: str
) -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["word"] == b"not":
            raise RuntimeError("no negatives")
        return sample

    feed = Feed(index, sampler, **{what: fail})
    with pytest.raises(
        DecodeError, match=rf"record 3 \(.*\): {what} failed.*no negatives"
    ) as caught:
        batch_of(feed, request_of(2, 3))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_feed_pickles(index: Index, sampler: ExactOnceBatchSampler) -> None:
    feed = Feed(index, sampler, decode=measure)
    request = Request.of(sampler, 0, 0)
    assert batch_of(pickle.loads(pickle.dumps(feed)), request)["size"].tolist() == [2, 2, 2, 3]
    with batcher_of(feed, threads=2) as batcher:
        assert pickle.loads(pickle.dumps(batcher))(request)["size"].tolist() == [2, 2, 2, 3]


def test_feed_copies_its_mappings_and_makes_them_read_only(
    index: Index, sampler: ExactOnceBatchSampler
) -> None:
    spec = {"x": FieldSpec((1,), np.dtype(np.int64))}
    given: dict[str, Any] = {"collate": {"x": "pad"}, "side": {"w": np.arange(6)}, "spec": spec}
    feed = Feed(index, sampler, decode=lambda sample: {"x": np.zeros(1, np.int64)}, **given)
    before = feed[0, 0]
    for name, own in given.items():
        own["other"] = own.pop(next(iter(own)))
        with pytest.raises(TypeError, match="does not support item assignment"):
            getattr(feed, name)["other"] = 0
    assert before.keys() == feed[0, 0].keys() == {"id", "label", "w", "x", "x_length"}


def test_batches_depend_only_on_epoch_and_step(index: Index) -> None:
    feed = Feed(index, BatchSampler(RandomSampler(6, seed=0), batch_size=2))
    for step in (2, 0, 1):
        assert feed[3, step]["id"].tolist() == feed.sampler.batch(3, step).tolist()
    assert (feed.sampler.epoch, feed.sampler.step) == (0, 0)
    with ThreadPoolExecutor(3) as pool:
        sent = pickle.loads(pickle.dumps(feed))
        found = pool.map(sent.__getitem__, [(3, step) for step in (2, 0, 1)])
        assert [one["id"].tolist() for one in found] == [
            feed[3, n]["id"].tolist() for n in (2, 0, 1)
        ]


def test_shard_changes_only_the_sampler(index: Index) -> None:
    feed = Feed(index, ExactOnceBatchSampler(6, batch_size=4), decode=measure)
    ranks = [feed.shard(rank, 2) for rank in range(2)]
    assert [rank.sampler.rank for rank in ranks] == [0, 1]
    for step in range(len(feed)):
        slices = [rank[0, step]["size"] for rank in ranks]
        assert np.concatenate(slices).tolist() == feed[0, step]["size"].tolist()


def test_seeds_come_from_the_sampler(index: Index) -> None:
    sampler = PKBatchSampler(index.labels, p=3, k=2, seed=1)
    request = Request.of(sampler, 2, 0)
    assert request.seeds.tolist() == sampler.seeds(2, 0).tolist()
    assert request.ids.tolist() == sampler.batch(2, 0).tolist()


def test_callables_run_over_columns_alone(tmp_path: Path) -> None:
    ages = pack([{"age": age, "label": age % 2} for age in range(4)], tmp_path)["data"]
    sampler = ExactOnceBatchSampler(4, batch_size=4)
    side = {"teacher": np.arange(4.0)}

    def double(sample: dict[str, Any]) -> dict[str, Any]:
        return {"both": 2 * sample["age"] + sample["teacher"]}

    feed = Feed(ages, sampler, side=side, transform=double)
    assert batch_of(feed, request_of(1, 3))["both"].tolist() == [3.0, 9.0]
    feed = Feed(ages, sampler, decode=lambda _: {"one": 1})
    assert batch_of(feed, request_of(1, 3))["one"].tolist() == [1, 1]


def test_decode_error_advises_to_leave_the_record_out(tmp_path: Path) -> None:
    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": int(sample["word"])}

    index = pack([{"word": b"1"}, {"word": b"one"}], tmp_path)["data"]
    feed = Feed(index, ExactOnceBatchSampler(2, batch_size=2), decode=decode)
    with pytest.raises(
        DecodeError,
        match=r"(?s)record 1 .*correct decode, or leave the record out by .*replaced",
    ):
        feed[0, 0]
    others = ExactOnceBatchSampler(2, batch_size=2, records=[0])
    batch = Feed(index, others, decode=decode)[0, 0]
    assert batch["x"].tolist() == [1]
