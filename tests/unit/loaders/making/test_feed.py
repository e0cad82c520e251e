"""What all backends share: the fields of a batch, and the arguments of decode and transform."""

import io
import pickle
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.batches import made
from support.feeds import WORDS, batch_of, measure, request_of
from support.inside import batcher_of

from twinfeed.loaders import (
    ByRecord,
    DatasetSource,
    DecodeError,
    DecodeImage,
    Feed,
    FieldSpec,
    Index,
    NumpyLoader,
    Pad,
    Seeded,
    pack,
    plan,
    shuffled,
)
from twinfeed.loaders.feed.request import Request
from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    ReuseSampler,
    SequentialSampler,
    ViewSampler,
    WeightedSampler,
)

pytestmark = pytest.mark.usefixtures("readahead")

SAMPLER = ExactOnceBatchSampler(6, batch_size=4)


def test_batch_without_callables_has_ids_columns_and_fields(
    index: Index, sampler: ExactOnceBatchSampler
) -> None:
    batch = batch_of(Feed(index, sampler), Request.of(sampler, 0, 1))
    assert list(batch) == ["id", "label", "word"]
    assert batch["id"].tolist() == [4, 5]
    assert batch["label"].tolist() == [1, 2]
    assert batch["word"] == [b"to", b"be"]


@pytest.fixture(scope="module")
def repeating() -> BatchSampler:
    """A sampler whose batches may hold a record several times."""
    return BatchSampler(WeightedSampler([1] * 6, seed=0), batch_size=4)


@pytest.mark.parametrize("threads", [0, 3])
def test_decode_runs_once_for_each_record_of_a_batch(
    index: Index, repeating: BatchSampler, threads: int
) -> None:
    calls: Counter[bytes] = Counter()

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        calls[sample["word"]] += 1
        return measure(sample)

    feed = Feed(index, repeating, decode=decode)
    assert feed.spec
    calls.clear()
    batch = batch_of(feed, request_of(3, 2, 3, 3), threads)
    assert batch["size"].tolist() == [3, 2, 3, 3]
    assert batch["size"].dtype == np.int32
    assert calls == {b"not": 1, b"or": 1}


def test_decoding_threads_are_reused_for_every_batch(
    index: Index, sampler: ExactOnceBatchSampler
) -> None:
    """Threads made anew for each batch cost more than what they do."""
    seen = set()

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        seen.add(threading.current_thread())
        return measure(sample)

    feed = Feed(index, sampler, decode=decode)
    assert feed.spec
    seen.clear()
    with batcher_of(feed, threads=2) as batcher:
        for _ in range(5):
            batcher(request_of(0, 1, 2, 3))
    assert 1 <= len(seen) <= 2


def test_transform_receives_sample_columns_ids_and_seeds(
    index: Index, sampler: ExactOnceBatchSampler
) -> None:
    told = []

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        told.append(sample)
        return sample

    side = {"weight": np.arange(6, dtype=np.float32) / 2}
    feed = Feed(index, sampler, decode=measure, transform=transform, side=side)
    assert feed.spec
    told.clear()
    batch = batch_of(feed, request_of(3, 1, views=(0, 7)))
    assert len(told) == 2
    assert told[1] == {
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


@pytest.mark.parametrize("decode", [None, measure])
def test_an_empty_batch_has_every_field(
    index: Index, sampler: ExactOnceBatchSampler, decode: Any
) -> None:
    feed = Feed(index, sampler, decode=decode, side={"weight": np.zeros((6, 2), np.float32)})
    full, empty = batch_of(feed, request_of(1, 2)), batch_of(feed, request_of())
    assert list(empty) == list(full)
    for name, value in empty.items():
        if isinstance(value, list):
            assert value == []
        else:
            assert (value.shape, value.dtype) == ((0, *full[name].shape[1:]), full[name].dtype)


@pytest.mark.parametrize("decode", [None, measure])
def test_padding_is_zeros_and_never_read(index: Index, decode: Any) -> None:
    sampler = ExactOnceBatchSampler(6, batch_size=4, last_batch="pad")
    batch = batch_of(Feed(index, sampler, decode=decode), Request.of(sampler, 0, 1))
    assert batch["id"].tolist() == [4, 5, -1, -1]
    assert batch["mask"].tolist() == [True, True, False, False]
    assert batch["label"].tolist() == [1, 2, 0, 0]
    if decode is None:
        assert batch["word"] == [b"to", b"be", b"", b""]
    else:
        assert batch["size"].tolist() == [2, 2, 0, 0]


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
        assert batcher(request)["size"].tolist() == [2, 2, 2, 3]
        assert pickle.loads(pickle.dumps(batcher))(request)["size"].tolist() == [2, 2, 2, 3]


def test_batcher_pickles_without_the_sampler(tmp_path: Path) -> None:
    """Workers need no copy of the labels."""
    many = pack([{"x": bytes(1), "label": n % 9} for n in range(3)], tmp_path)
    few = Feed(many["data"], BatchSampler(RandomSampler(3, seed=0), batch_size=1))
    sampler = BatchSampler(WeightedSampler(np.arange(1, 4), seed=0), batch_size=1)
    sizes = [len(pickle.dumps(batcher_of(feed))) for feed in (few, Feed(many["data"], sampler))]
    assert b"samplers" not in pickle.dumps(batcher_of(few))
    assert abs(sizes[0] - sizes[1]) < 200


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


@pytest.mark.parametrize(("reuse", "live"), [(3, 4), (2, 8), (5, 20), (1, 4)])
def test_reuse_sampler_decodes_each_record_once_while_live(
    tmp_path: Path, reuse: int, live: int
) -> None:
    n = 21
    index = pack([{"number": bytes([number])} for number in range(n)], tmp_path)["data"]
    sampler = BatchSampler(ReuseSampler(n, reuse=reuse, live=live, seed=0), batch_size=4)
    feed = Feed(index, sampler, decode=lambda sample: {"number": sample["number"][0]})
    batcher = batcher_of(feed)
    cache = batcher.samples.cache
    assert cache is not None
    for epoch in range(3):
        before = cache.decodes
        for step in range(len(sampler)):
            batch = batcher(Request.of(sampler, epoch, step))
            assert batch["number"].tolist() == sampler.records(batch["id"]).tolist()
        assert n <= cache.decodes - before <= n + live - 1
    assert cache.peak <= live


def test_passes_over_one_reuse_feed_have_separate_caches(index: Index) -> None:
    """Two passes that take turns would drop each other's images."""
    decoded = []

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        decoded.append(sample["word"])
        return measure(sample)

    sampler = BatchSampler(ReuseSampler(6, reuse=3, live=4, seed=0), batch_size=2)
    feed = Feed(index, sampler, decode=decode)
    assert feed.spec
    decoded.clear()
    list(made(feed))
    alone = len(decoded)
    decoded.clear()
    for _ in zip(made(feed), made(feed), strict=True):
        pass
    assert len(decoded) == 2 * alone


def test_padding_keeps_id_minus_one_when_transform_returns_all_keys(index: Index) -> None:
    sampler = ExactOnceBatchSampler(6, batch_size=4, last_batch="pad")
    feed = Feed(index, sampler, transform=lambda sample: sample)
    assert batch_of(feed, Request.of(sampler, 0, 1))["id"].tolist() == [4, 5, -1, -1]


def test_numbers_have_native_byte_order(index: Index, sampler: ExactOnceBatchSampler) -> None:
    side = {"weight": np.arange(6, dtype=">f4")}
    feed = Feed(index, sampler, decode=lambda _: {"x": np.ones(2, ">i4")}, side=side)
    batch = batch_of(feed, request_of(2))
    assert batch["x"].dtype.isnative
    assert batch["weight"].dtype.isnative
    assert (batch["x"].tolist(), batch["weight"].tolist()) == ([[1, 1]], [2.0])


def array(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.full(3, float(len(sample["word"])))}


def in_place(sample: dict[str, Any]) -> dict[str, Any]:
    sample["x"] += 1
    return {"x": sample["x"]}


@pytest.mark.parametrize("threads", [0, 3])
def test_transform_may_write_to_unshared_arrays(
    index: Index, sampler: ExactOnceBatchSampler, threads: int
) -> None:
    feed = Feed(index, sampler, decode=array, transform=in_place)
    assert not feed.shares_arrays
    assert batch_of(feed, request_of(3, 2, 1), threads)["x"][:, 0].tolist() == [4, 3, 3]


def shared_feed(index: Index, kind: str, transform: Any, **options: Any) -> Feed:
    """A feed whose samples share what was decoded."""
    orders: dict[str, Any] = {
        "reuse": ReuseSampler(6, reuse=3, live=4, seed=0),
        "views": ViewSampler(SequentialSampler(12), [2] * 6, per_epoch="all", seed=0),
        "repeats": WeightedSampler([1] * 6, seed=0),
    }
    sampler = BatchSampler(orders[kind], batch_size=2)
    return Feed(index, sampler, decode=array, transform=transform, **options)


@pytest.mark.parametrize("kind", ["reuse", "views", "repeats"])
def test_arrays_shared_by_samples_are_read_only(index: Index, kind: str) -> None:
    """Whatever a batch happens to hold."""
    with pytest.raises(DecodeError, match=r"read-only.*as in image\.copy\(\)"):
        next(made(shared_feed(index, kind, in_place)))
    flags = []

    def look(sample: dict[str, Any]) -> dict[str, Any]:
        flags.append(sample["x"].flags.writeable)
        return {"x": sample["x"] + 1}

    feed = shared_feed(index, kind, look)
    assert feed.spec
    flags.clear()
    for batch in made(feed):
        right = [len(WORDS[record]) + 1 for record in feed.sampler.records(batch["id"])]
        assert batch["x"][:, 0].tolist() == right
    assert not any(flags)


def test_shared_objects_other_than_arrays_are_copied(index: Index) -> None:
    def lists(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": [float(len(sample["word"]))]}

    def grow(sample: dict[str, Any]) -> dict[str, Any]:
        sample["x"][0] += 1
        return {"x": sample["x"]}

    sampler = BatchSampler(ReuseSampler(6, reuse=3, live=4, seed=0), batch_size=2)
    feed = Feed(index, sampler, decode=lists, transform=grow)
    for batch in made(feed):
        right = [len(WORDS[record]) + 1 for record in sampler.records(batch["id"])]
        assert batch["x"][:, 0].tolist() == right


def test_crops_of_cached_image_are_views(index: Index) -> None:
    def large(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": np.zeros((100, 100, 3), np.uint8)}

    kept = []  # so that no address is given out twice

    def crop(sample: dict[str, Any]) -> dict[str, Any]:
        kept.append(sample["x"])
        return {"x": sample["x"][:4, :4]}

    sampler = BatchSampler(ReuseSampler(6, reuse=4, live=6, seed=0), batch_size=2)
    feed = Feed(index, sampler, decode=large, transform=crop)
    assert feed.spec
    kept.clear()
    list(made(feed))
    addresses = {array.__array_interface__["data"][0] for array in kept}
    assert len(kept) == 6 * 4
    assert len(addresses) <= 6 + 5  # those live at both ends of the epoch are decoded twice


def test_read_only_results_of_decode_are_made_writable(
    tmp_path: Path,
) -> None:
    """Pillow's images, and arrays over the bytes that were read."""
    image = np.full((4, 4, 3), 7, np.uint8)
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    images = pack([{"x": file.getvalue(), "raw": bytes(8)}] * 2, tmp_path)["data"]
    sampler = ExactOnceBatchSampler(2, batch_size=2)
    decodes: list[Any] = [
        DecodeImage("x"),
        DecodeImage("x", size=(3, 3)),
        lambda sample: {"x": np.frombuffer(sample["raw"], np.float32)},
    ]
    for decode in decodes:
        batch = batch_of(Feed(images, sampler, decode=decode, transform=in_place), request_of(0, 1))
        assert (batch["x"] == batch["x"].flat[0]).all()
        assert batch["x"].flat[0] in (8, 1)


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


@pytest.mark.parametrize("how", ["stack", "ragged"])
def test_batches_must_match_first_record_or_spec(
    index: Index, sampler: ExactOnceBatchSampler, how: Any
) -> None:
    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": np.zeros((2, len(sample["word"])))}

    with pytest.raises(DecodeError, match=r"record 3 .*shape \(2, 3\), but .* first record"):
        batch_of(Feed(index, sampler, decode=decode, collate=how), request_of(3))
    spec = {"x": FieldSpec((2, None), np.dtype(float))}
    feed = Feed(index, sampler, decode=decode, spec=spec, collate=how)
    made = batch_of(feed, request_of(3))["x"]
    assert (made if how == "stack" else made.values).shape[-1] == 3
    with pytest.raises(DecodeError, match=r"shape \(2, 3\), but \(.*2\).*with 'pad'"):
        batch_of(feed, request_of(2, 3))
    empty = batch_of(feed, request_of())["x"]
    assert (empty if how == "stack" else empty.values).shape[-1] == 0


def test_decode_error_advises_to_exclude_the_record(tmp_path: Path) -> None:
    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": int(sample["word"])}

    index = pack([{"word": b"1"}, {"word": b"one"}], tmp_path)["data"]
    feed = Feed(index, ExactOnceBatchSampler(2, batch_size=2), decode=decode)
    with pytest.raises(
        DecodeError,
        match=r"(?s)record 1 .*mend decode, or leave the record out: .*SubsetSampler",
    ):
        feed[0, 0]
    others = ExactOnceBatchSampler(2, batch_size=2, records=[0])
    batch = Feed(index, others, decode=decode)[0, 0]
    assert batch["x"].tolist() == [1]


@pytest.mark.parametrize("rank", [0, 1])
def test_spec_comes_from_first_sample_of_the_stream(index: Index, rank: int) -> None:
    """Record 0 is broken. All ranks take the spec from the first sample of the whole stream."""
    tried: list[bytes] = []

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        tried.append(sample["word"])
        return {"x": {b"be": 1, b"or": 2, b"not": 3}[sample["word"]]}

    sampler = ExactOnceBatchSampler(len(index), batch_size=2, records=[1, 2, 3])
    feed = Feed(index, sampler.shard(rank, 2), decode=decode)
    assert feed.spec == {"x": ((), np.int64)}
    assert set(tried) == {b"be", b"or"}
    seen = [one for batch in NumpyLoader(feed) for one in batch["x"].tolist()]
    assert seen == [[1, 3], [2]][rank]
    assert b"to" not in tried


def test_empty_stream_has_the_spec_of_record_0(index: Index) -> None:
    sampler = ExactOnceBatchSampler(len(index), batch_size=2, records=[])
    assert Feed(index, sampler, decode=lambda one: {"x": len(one["word"])}).spec.keys() == {"x"}


@pytest.mark.parametrize("own", [False, True])
def test_spec_makes_reading_record_0_unnecessary(tmp_path: Path, own: bool) -> None:
    """As on a machine that has the shards of its rank alone."""
    images = []
    for value in (1, 2):
        file = io.BytesIO()
        Image.new("RGB", (2, 2), (value,) * 3).save(file, "png")
        images.append({"x": file.getvalue()})
    two = pack(images, tmp_path, shard_records=1)["data"]
    min(tmp_path.glob("*.tfrecord")).unlink()
    decode: Any = DecodeImage("x") if own else DecodeImage("x").__call__
    sampler = BatchSampler(SequentialSampler(2), batch_size=1)
    spec = {"x": FieldSpec((2, 2, 3), np.dtype(np.uint8))}
    batch = Feed(two, sampler, decode=decode, spec=spec)[0, 1]
    assert batch["x"].max() == 2
    with pytest.raises(FileNotFoundError):
        Feed(two, sampler, decode=decode)[0, 1]


@pytest.mark.frameworks
def test_torch_side_table_is_refused(index: Index, sampler: ExactOnceBatchSampler) -> None:
    import torch

    with pytest.raises(TypeError, match="side table 'w' must be an array of numbers"):
        Feed(index, sampler, side={"w": torch.zeros(6)})  # type: ignore[dict-item]


# What repeats itself


class OwnGenerator:
    """Draw from a generator of its own, as albumentations does."""

    def __init__(self) -> None:
        self.set_random_seed(0)

    def set_random_seed(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": self.generator.random()}


DRAWS: dict[str, Any] = {
    "random": lambda _: {"x": random.random()},
    "numpy": lambda _: {"x": np.random.random()},
    "sometimes": lambda _: {"x": 1.0 if random.random() < 0.5 else 0.0},
    "a generator of its own": OwnGenerator(),
}


def seldom(_: object) -> dict[str, Any]:
    """Differ only once in the sixteen calls of the trial."""
    return {"x": 1.0 if random.random() > 0.96 else 0.0}


@pytest.mark.parametrize("draw", [*DRAWS.values(), seldom], ids=[*DRAWS, "seldom"])
def test_unseeded_random_transform_is_refused(
    index: Index, sampler: ExactOnceBatchSampler, draw: Any
) -> None:
    told = r"transform returned different results for one sample and one seed.*Seeded\(transform\)"
    with pytest.raises(ValueError, match=told):
        next(made(Feed(index, sampler, transform=draw)))
    spec = {"x": FieldSpec((), np.dtype(float))}
    with pytest.raises(ValueError, match=told):
        next(made(Feed(index, sampler, transform=draw, spec=spec)))


def states() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist()]


def test_trial_of_transform_keeps_global_random_states(
    index: Index, sampler: ExactOnceBatchSampler
) -> None:
    before = states()
    feed = Feed(index, sampler, transform=lambda sample: {"x": sample["seed"]})
    assert feed.spec
    assert states() == before


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_seeded_transform_is_repeatable(
    index: Index, sampler: ExactOnceBatchSampler, draw: Any
) -> None:
    also = [draw] if isinstance(draw, OwnGenerator) else []
    feed = Feed(index, sampler, transform=Seeded(draw, also=also))
    first = [batch["x"].tolist() for batch in made(feed)]
    before = states()
    assert [batch["x"].tolist() for batch in made(feed)] == first
    assert states() == before
    assert len({value for batch in first for value in batch}) > 1


def test_threads_call_a_seeded_transform_one_at_a_time(
    index: Index, sampler: ExactOnceBatchSampler
) -> None:
    """Another call in between would set the global states anew."""

    def slow(_: object) -> dict[str, Any]:
        first = random.random()
        time.sleep(0.002)
        return {"x": [first, random.random()]}

    feed = Feed(index, sampler, transform=Seeded(slow))
    request = request_of(*range(6))
    alone, shared = (batch_of(feed, request, threads)["x"].tolist() for threads in (0, 4))
    assert shared == alone


def test_seeds_have_64_and_32_bits(index: Index) -> None:
    told = []

    def note(sample: dict[str, Any]) -> dict[str, Any]:
        told.append((sample["seed"], sample["seed32"]))
        np.random.default_rng(sample["seed32"])
        return {"x": 1}

    feed = Feed(index, BatchSampler(RandomSampler(6, seed=0), batch_size=6), transform=note)
    feed[0, 0]
    assert all(seed % 2**32 == seed32 for seed, seed32 in told)
    assert any(seed >= 2**32 for seed, _ in told)


def test_trial_passes_fresh_samples_to_a_writing_transform(tmp_path: Path) -> None:
    """The trial calls a transform often, each time with the sample as decode gave it."""

    def brighter(sample: dict[str, Any]) -> dict[str, Any]:
        sample["x"] += 1
        return {"x": sample["x"].copy()}

    index = pack([{"word": b"to"}, {"word": b"be"}], tmp_path)["data"]
    feed = Feed(
        index,
        BatchSampler(SequentialSampler(2), batch_size=2),
        decode=lambda sample: {"x": np.zeros(2)},
        transform=brighter,
    )
    assert [batch["x"].tolist() for batch in NumpyLoader(feed)] == [[[1, 1], [1, 1]]]


# What is refused


def feed(at: int | None = None, *, of: Any = SAMPLER, **options: Any) -> Callable[[Index], object]:
    """Return what makes a feed of these options, and a batch of the record `at`."""

    def make(index: Index) -> object:
        feed = Feed(index, of, **options)
        if at is None:
            return feed
        return batch_of(feed, request_of(at - 1, at) if at else request_of(0))

    return make


def worded(sample: dict[str, Any]) -> dict[str, Any]:
    return {sample["word"].decode(): 1}


def decoded_in_place(index: Index) -> object:
    decode = DecodeImage("jpg")
    decode.reads = ()  # type: ignore[assignment]
    spec = {"jpg": FieldSpec((2, 2, 3), np.dtype(np.uint8))}
    return feed(1, decode=decode, spec=spec)(index)


def none(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": None if sample["word"] == b"or" else 1}


def widened(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.full(2, 7, np.int64 if sample["word"] == b"not" else np.uint8)}


def shuffling(**options: Any) -> Callable[[Index], object]:
    return lambda index: shuffled(index, seed=0, **options)


GIVEN = ["id", "record", "view", "seed", "seed32"]
TABLE = {"word": np.arange(6)}
TAKEN = "has the name of a side table"
NAMES = {"id": SAMPLER, "mask": ExactOnceBatchSampler(6, batch_size=4, last_batch="pad")}
OF_BATCH = "has a name that the loader itself gives to every batch"
ARRAY = "side table 'w' must be an array of numbers or a list of str, got"
TEXTS = ["a", "", "ß", "\0", "🦉"]
MASKED = np.ma.array([*TEXTS, "f"], mask=[0, 0, 0, 1, 0, 0])

REFUSED: list[tuple[Callable[[Any], object], type[Exception], str]] = [
    (feed(of=ExactOnceBatchSampler(7, batch_size=2)), ValueError, "for 7 records, the index has 6"),
    (lambda index: Feed(str(index.path), SAMPLER), TypeError, "got a str: open_index"),  # type: ignore[arg-type]
    (feed(of=RandomSampler(6, seed=0)), TypeError, "got a RandomSampler: BatchSampler"),
    (
        lambda i: setattr(feed()(i), "sampler", 0),
        AttributeError,
        "does not change: make another Feed",
    ),
    (lambda i: delattr(feed()(i), "sampler"), AttributeError, "field 'sampler'"),
    (plan, TypeError, r"feed must be Feed\(index, sampler\), got Index"),  # type: ignore[arg-type]
    (feed(fields=["zz"]), KeyError, "no field 'zz'"),
    (feed(fields="word"), TypeError, "fields must be a list of names, got 'word'"),
    *(
        row
        for name in ("decode", "transform")
        for row in (
            (feed(**{name: "jpg"}), TypeError, f"{name} must be a function of a sample, got 'jpg'"),
            (
                feed(**{name: DecodeImage}),
                TypeError,
                f"{name} must be .*, got <class .*DecodeImage",
            ),
            (
                feed(2, **{name: none}),
                DecodeError,
                rf"record 2.*{name} returned None for field 'x",
            ),
        )
    ),
    *((feed(**{n: [1]}), TypeError, rf"{n} must be a dict, got \[1\]") for n in ("side", "spec")),
    *(
        (feed(spec={"x": one}), TypeError, r"spec of 'x' must be like FieldSpec\(.*, got ")
        for one in (3, ((2,), "no dtype"), ((2,), np.int64, 1))
    ),
    *(
        (feed(side={"w": [*TEXTS, last]}), TypeError, rf"{ARRAY} a list whose row 5 is {shown}:")
        for last, shown in {None: "None", 1.5: "1.5", b"b": "b'b'", "\ud800": r"'\\ud800'"}.items()
    ),
    *(
        (feed(side={"w": table}), TypeError, f"{ARRAY} a {type(table).__name__} whose row 0 is ")
        for table in ("abcdef", [[text] for text in TEXTS], dict(enumerate(TEXTS)), [1, 2])
    ),
    (feed(side={"w": MASKED}), ValueError, "'w' must have no masked entry, got one at 3"),
    (feed(side={"w": TEXTS}), ValueError, "'w' has 5 rows, the sampler 6 sample ids.*ByRecord"),
    (feed(side={"w": ByRecord(TEXTS)}), ValueError, "'w' has 5 rows, the sampler 6 records"),
    (feed(side={"w": ByRecord([None])}), TypeError, ARRAY),
    (feed(side={"w": np.zeros(3)}), ValueError, "'w' has 3 rows, the sampler 6"),
    (feed(side={"w": np.zeros(7)}), ValueError, "'w' has 7 rows, the sampler 6"),
    (feed(side={"label": np.zeros(6)}), ValueError, "table 'label' has the name of a column"),
    (feed(side=TABLE), ValueError, f"field 'word' {TAKEN}"),
    (feed(0, decode=dict, side=TABLE), ValueError, f"'word' {TAKEN}.* in decode"),
    (feed(0, decode=dict, transform=dict, side=TABLE), ValueError, f"'word' {TAKEN}.* in decode"),
    (feed(0, collate={"wrod": "pad"}), ValueError, r"\['wrod'\], the fields are \['word'\]"),
    (feed(0, decode=lambda _: {1: 2}), TypeError, "the name of a field must be a str, got 1"),
    (feed(2, decode=worded), DecodeError, r"record 2 .*\['or'\].*\['be'\]"),
    (
        lambda index: batch_of(Feed(index, SAMPLER, decode=worded), request_of(2)),
        DecodeError,
        r"record 2 .*\['or'\] where \['to'\] are expected",
    ),
    (feed(0, decode=lambda _: None), DecodeError, "return a dict of fields, got a NoneType"),
    (
        feed(0, decode=lambda sample: {"x": sample["label"]}),
        DecodeError,
        r"\('label'\); .* \['word'\]",
    ),
    (decoded_in_place, DecodeError, r"KeyError\('jpg'\); it was given \['word'\]"),
    *(
        (
            feed(0, transform=lambda sample, name=name: sample | {name: 9}),
            DecodeError,
            f"record 0 .* changed '{name}': rename",
        )
        for name in GIVEN
    ),
    *(
        (
            feed(0, decode=lambda _, name=name: {name: 5}, transform=lambda sample: sample),
            ValueError,
            f"field '{name}' .* itself gives to every sample",
        )
        for name in GIVEN
    ),
    *(
        row
        for name, of in NAMES.items()
        for row in (
            (
                feed(0, of=of, decode=lambda _, name=name: {name: 5}),
                ValueError,
                f"^field {name!r} {OF_BATCH}: .* in decode",
            ),
            (feed(of=of, side={name: np.zeros(6)}), ValueError, f"^side table {name!r} {OF_BATCH}"),
        )
    ),
    (
        lambda index: next(made(Feed(index, SAMPLER, decode=lambda _: {"x": np.random.rand()}))),
        ValueError,
        r"^decode returned different results.*draw random numbers in transform",
    ),
    (lambda _: Seeded(dict, also=[3]), TypeError, "hold objects with set_random_seed, got 3"),  # type: ignore[list-item]
    (lambda index: Feed(index, SAMPLER)[-1, 0], IndexError, "epoch"),
    (lambda index: Feed(index, SAMPLER)[0, -1], IndexError, "epoch"),
    (lambda index: Feed(index, SAMPLER)[0, 2], IndexError, "epoch"),
    (lambda index: Feed(index, SAMPLER)[0, "2"], TypeError, "step must be an integer, got '2'"),  # type: ignore[index]
    (
        lambda index: next(iter(Feed(index, SAMPLER))),  # type: ignore[call-overload]
        TypeError,
        r"feed\[0, 0\] is the first batch of epoch 0, got feed\[0\]: iterate",
    ),
    (shuffling(memory=0), ValueError, "memory must be at least 1"),
    (shuffling(records=[6]), IndexError, "ids must lie in"),
    (shuffling(records=[1, 1]), ValueError, "records must differ"),
    (lambda _: DecodeImage(mode="CMYK"), ValueError, "one of 'RGB', 'L', got 'CMYK'"),  # type: ignore[arg-type]
    (lambda _: DecodeImage((64, 64)), TypeError, r"field, got \(64, 64\); size= resizes"),  # type: ignore[arg-type]
    (lambda _: DecodeImage(size=(0, 4)), ValueError, "height"),
    (lambda _: DecodeImage(size=(4, -1)), ValueError, "width"),
    (lambda _: DecodeImage(size=(2.5, 3)), TypeError, "height"),  # type: ignore[arg-type]
    (lambda _: DecodeImage(size=64), ValueError, r"\(height, width\), got 64"),  # type: ignore[arg-type]
    (lambda _: DecodeImage(size=224), ValueError, r"got 224: write size=\(224, 224\)"),  # type: ignore[arg-type]
    (lambda _: DecodeImage(fit="crop"), ValueError, r"fit= needs size=\(height, width\)"),
    (
        lambda _: DecodeImage(size=(2, 2), fit="fill"),
        ValueError,
        "'stretch', 'crop', 'pad', got 'fi",
    ),  # type: ignore[arg-type]
    (lambda _: DecodeImage(reducing_gap=2.0), ValueError, r"reducing_gap= needs size=\(height"),
    (lambda _: DecodeImage(size=(2, 2), reducing_gap=0.5), ValueError, "at least 1, got 0.5"),
    (lambda _: DecodeImage(size=(2, 2), reducing_gap=float("nan")), ValueError, "1, got nan"),
    (feed(collate={"word": "concat"}), ValueError, "stack, pad, ragged, or a Pad, got 'concat'"),
    *(
        (feed(3, decode=widened, collate=how), DecodeError, r"record 3 \(.*\): .*int64 where ui")
        for how in ("stack", "pad", "ragged")
    ),
    (
        feed(0, decode=lambda _: {"x": [1]}, collate={"x": Pad(value=0.5)}),
        ValueError,
        "'Pad of x' holds float64 0.5 where int64",
    ),
    (feed(0, batch_transform=3), TypeError, "a function of a batch and its seed, got 3"),
    (feed(0, collate_fn=dict), TypeError, "batch_transform="),
    (
        feed(0, of=NAMES["mask"], batch_transform=lambda batch, _: {"mask": batch["label"]}),
        ValueError,
        "'mask' has a name",
    ),
    (
        feed(batch_spec={"x": ((), "int64")}),
        ValueError,
        "batch_spec describes the result of batch_transform",
    ),
    (
        feed(0, batch_transform=lambda b, _: b, batch_spec={"z": ((), "int64")}),
        DecodeError,
        r"step 0: the fields are \['label', 'word'\] where \['label', 'word', 'z'\] are",
    ),
]


@pytest.mark.parametrize(("call", "kind", "word"), REFUSED)
def test_feed_refuses_bad_arguments(
    index: Index, call: Callable[[Index], object], kind: type[Exception], word: str
) -> None:
    with pytest.raises(kind, match=word):
        call(index)


def test_reserved_names_of_columns_and_fields_are_refused(tmp_path: Path) -> None:
    for name, of in NAMES.items():
        column = pack([{name: n} for n in range(6)], tmp_path / f"{name} column")["data"]
        with pytest.raises(ValueError, match=f"^column {name!r} {OF_BATCH}: .* with fields="):
            Feed(column, of)
        field = pack([{name: b"x"} for n in range(6)], tmp_path / f"{name} field")["data"]
        with pytest.raises(ValueError, match=f"^field {name!r} {OF_BATCH}: leave it out .* decode"):
            Feed(field, of)
        renamed = Feed(field, of, decode=lambda sample, name=name: {"own": sample[name]})
        assert batch_of(renamed, request_of(0))["own"] == [b"x"]


@pytest.mark.parametrize(("end", "value"), [("length", np.ones(2)), ("shape", np.ones((2, 1)))])
@pytest.mark.parametrize("how", ["pad", Pad(value=1), {"x": "pad"}])
def test_field_named_as_padding_sizes_is_refused(end: str, value: Any, how: Any) -> None:
    """Fault 109: the true lengths would take the place of the user's values."""
    name, numbers, sampler = (
        f"x_{end}",
        np.arange(6),
        BatchSampler(SequentialSampler(6), batch_size=4),
    )
    x = {"x": [value] * 6}

    def both(sample: dict[str, Any]) -> dict[str, Any]:
        return {name: 1, "x": value}

    feeds: dict[str, list[Any]] = {
        "field": [
            (DatasetSource(x | {name: numbers}), {}),
            (DatasetSource({name: numbers} | x), {}),
            (DatasetSource(x), {"decode": both}),
            (DatasetSource(x), {"transform": both}),
            (DatasetSource(x), {"decode": both, "batch_transform": lambda batch, _: batch}),
        ],
        "column": [(DatasetSource(x, columns={name: numbers}), {})],
        "side table": [(DatasetSource(x), {"side": {name: numbers}})],
    }
    for what, cases in feeds.items():
        for rows, options in cases:
            feed = Feed(rows, sampler, collate=how, **options)
            with pytest.raises(
                ValueError, match=f"^{what} '{name}' has the name of the sizes that 'pad' adds"
            ):
                feed[0, 0]
            assert Feed(rows, sampler, **options)[0, 0][name].shape == (4,)  # nothing is padded
    spec = {"x": FieldSpec(value.shape, value.dtype), name: FieldSpec((), np.dtype(int))}
    with pytest.raises(ValueError, match=f"^field '{name}' has the name"):
        Feed(DatasetSource(x), sampler, decode=both, collate=how, spec=spec)[0, 0]
    other = Feed(DatasetSource(x | {"y_length": numbers, "y_shape": numbers}), sampler, collate=how)
    assert other[0, 0]["y_length"].tolist() == [0, 1, 2, 3]


def test_lists_of_strings_may_start_with_an_empty_list(tmp_path: Path) -> None:
    """The index knows what they hold; a decode may hand them on."""
    tags = [np.array([b"a\0", b"b"][: n % 3], object) for n in range(9)]
    index = pack([{"tags": one} for one in tags], tmp_path)["data"]
    for seed in range(8):
        sampler = BatchSampler(RandomSampler(9, seed=seed), batch_size=9)
        for options in ({}, {"decode": dict}, {"decode": dict, "transform": dict}):
            feed: Any = Feed(index, sampler, collate={"tags": "ragged"}, **options)  # type: ignore[arg-type]
            found = feed[0, 0]
            wanted = [one for record in found["id"] for one in tags[record].tolist()]
            assert found["tags"].values.tolist() == wanted
    rows = DatasetSource([{"tags": one.tolist()} for one in tags])
    with pytest.raises(DecodeError, match=r"'ragged', and needs spec= if the first list is empty"):
        Feed(rows, BatchSampler(SequentialSampler(9), batch_size=9), collate="ragged")[0, 0]
    spec = {"tags": FieldSpec((None,), None)}
    assert len(Feed(rows, sampler, collate="ragged", spec=spec)[0, 0]["tags"].values) == 9
