"""A dataset in the order of a sampler: what any host that reads in sequence delivers."""

import copy
import pickle
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.datasets import FRAMEWORKS, KINDS
from support.refusals import Call, Refused
from support.sampler_cases import CASES
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torch.utils.data import RandomSampler as TorchRandomSampler

from twinfeed.loaders import Feed, LoaderError, NumpyLoader
from twinfeed.loaders.torch import EndlessSampler, Ordered, TorchDistributedSampler, ordered
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    IdSequence,
    PKBatchSampler,
    RandomSampler,
    ReuseSampler,
    Sampler,
    SubsetSampler,
    WeightedSampler,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
LABELS = np.arange(90) % 15
STREAMS: dict[str, Callable[[], Any]] = {
    name: make
    for name, make in CASES
    if make().fixed_size
    and make().num_records < 1000
    and make().traits.num_ids is None
    and not make().traits.padded
}
ORDERS: dict[str, Callable[[], Any]] = {
    "random": lambda: RandomSampler(63, seed=0),
    "weighted": lambda: WeightedSampler(np.arange(1, 41.0), seed=0),
    "subset": lambda: SubsetSampler([7, 3, 5], of=63, order=RandomSampler(3, seed=2)),
}
SAMPLERS = STREAMS | ORDERS


def stream_of(sampler: Any, count: int) -> list[int]:
    """Return the first ids of all epochs, by the definition."""
    ids: list[int] = []
    epoch = 0
    while len(ids) < count:
        if isinstance(sampler, BatchStream):
            ids += chain.from_iterable(b.tolist() for b in sampler.batches(epoch, 0, len(sampler)))
        else:
            ids += sampler.ids(epoch, np.arange(len(sampler))).tolist()
        epoch += 1
    return ids[:count]


def size_of(sampler: Any) -> int:
    return sampler.fixed_size if isinstance(sampler, BatchStream) else 1


def worlds_of(sampler: Any) -> list[int]:
    """Return the numbers of ranks that divide a batch."""
    worlds = []
    for world_size in (1, 2, 3, 4):
        try:
            ordered(range(sampler.num_records), sampler).shard(0, world_size)
        except ValueError:
            continue
        worlds.append(world_size)
    return worlds


@pytest.mark.parametrize("name", SAMPLERS)
def test_ids_delivered_are_those_of_stream(name: str) -> None:
    """From any cut, on any number of ranks after it, in any batches of the host."""
    sampler = SAMPLERS[name]()
    data, size = range(sampler.num_records), size_of(sampler)
    expected = stream_of(sampler, 60 * size + 80)
    for step, world_size in enumerate(worlds_of(sampler) * 3):
        start = 3 * step * size
        ranks = [
            ordered(data, sampler, start=start).shard(rank, world_size)
            for rank in range(world_size)
        ]
        part = max(1, size // world_size) * (1 if size > 1 else 4)  # a batch of the host
        for read in range(6):
            batches = [rank.__getitems__(range(read * part, (read + 1) * part)) for rank in ranks]
            begin = start + read * part * world_size
            whole = expected[begin : begin + part * world_size]
            assert sorted(chain(*batches)) == sorted(whole)
            if size > 1 or world_size == 1:
                assert [*chain(*batches)] == whole
    one = ordered(data, sampler, start=3 * size)
    assert [one[index] for index in range(20)] == expected[3 * size : 3 * size + 20]
    ids = np.asarray(IdSequence(sampler, epochs=4))
    assert ids.tolist() == stream_of(sampler, len(ids))
    scattered = np.random.default_rng(0).integers(0, len(ids), 20)
    assert np.array_equal(IdSequence(sampler, epochs=4)[scattered], ids[scattered])


@pytest.mark.parametrize("workers", [0, 2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_workers_deliver_stream(workers: int, world_size: int) -> None:
    sampler = PKBatchSampler(LABELS, p=4, k=2, seed=0)
    whole = ordered(range(90), sampler, start=16)
    ranks = [whole.shard(rank, world_size) for rank in range(world_size)]
    size = 8 // world_size
    options: dict[str, Any] = {"batch_size": size, "num_workers": workers}
    loaders = [DataLoader(rank, **options) for rank in ranks]
    delivered = zip(*(islice(loader, 30) for loader in loaders), strict=True)
    ids = [torch.cat(batches).tolist() for batches in delivered]
    assert [*chain(*ids)] == stream_of(sampler, 256)[16:]


@pytest.mark.parametrize("how", ["forkserver", "spawn"])
def test_started_workers_share_labels(how: str) -> None:
    """They get the arrays of the sampler in shared memory, and persist over passes."""
    from multiprocessing.reduction import ForkingPickler

    sampler = PKBatchSampler(np.arange(100_000) % 1000, p=4, k=2, seed=0)
    data = ordered(range(100_000), sampler)
    loader = DataLoader(data, 8, num_workers=1, multiprocessing_context=how)
    assert [*chain(*(b.tolist() for b in islice(loader, 9)))] == stream_of(sampler, 72)
    assert len(ForkingPickler.dumps(data)) < 100_000 < len(pickle.dumps(data))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_and_copy_deliver_the_same(protocol: int) -> None:
    sampler = PKBatchSampler(np.arange(20_000) % 100, p=4, k=2, seed=0)
    data = ordered(range(20_000), sampler, start=8).shard(1, 2)
    data.__getitems__(range(8))
    expected = data.ids(range(100)).tolist()
    again = pickle.loads(pickle.dumps(data, protocol))
    for clone in (again, pickle.loads(pickle.dumps(again, protocol)), copy.deepcopy(data)):
        assert clone.__getitems__(range(100)) == expected


def test_pickle_of_another_version_is_refused() -> None:
    import twinfeed

    pickled = pickle.dumps(of_random(), 5)
    version = twinfeed.__version__.encode()
    assert pickled.count(version) == 1
    with pytest.raises(ValueError, match=r"pickled by twinfeed 9\..*make ordered"):
        pickle.loads(pickled.replace(version, b"9" + version[1:]))


@pytest.mark.parametrize("kind", KINDS | FRAMEWORKS)
def test_every_dataset_is_read(kind: str, tmp_path: Path) -> None:
    make, _ = (KINDS | FRAMEWORKS)[kind]
    sampler = RandomSampler(24, seed=0)
    data = ordered(make(tmp_path), sampler)
    labels = [
        int(item["label"] if isinstance(item, dict) else item[2])
        for item in [*data.__getitems__(range(30)), data[30]]
    ]
    assert labels == [number % 4 for number in stream_of(sampler, 31)]


def test_columns_and_features_are_those_of_dataset() -> None:
    import datasets

    data = datasets.Dataset.from_dict({"x": [1, 2, 3]})
    part = ordered(data, RandomSampler(3, seed=0)).shard(0, 1)
    assert (part.column_names, part.features) == (["x"], data.features)
    assert not hasattr(ordered([1, 2, 3], RandomSampler(3, seed=0)), "column_names")


def drawn(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.random.default_rng(sample["seed"]).random()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_feed_has_seeds_of_its_loaders(world_size: int) -> None:
    sampler = PKBatchSampler(LABELS, p=4, k=2, seed=0)
    feed = Feed({"label": LABELS}, sampler, transform=drawn)
    loader = NumpyLoader(feed)
    loaded = [batch["x"].tolist() for _ in range(2) for batch in loader]
    ranks = [ordered(feed, start=16).shard(rank, world_size) for rank in range(world_size)]
    loaders = [DataLoader(rank, 8 // world_size, num_workers=2 - world_size) for rank in ranks]
    delivered = zip(*(islice(loader, 12) for loader in loaders), strict=True)
    assert [torch.cat([b["x"] for b in batches]).tolist() for batches in delivered] == loaded[2:14]


def test_feed_with_sampler_of_ids_has_seeds_of_batches_of_one() -> None:
    order = RandomSampler(5, seed=3)
    feed = Feed({"n": np.arange(5)}, BatchSampler(order, batch_size=1), transform=drawn)
    loader = NumpyLoader(feed)
    expected = [batch["x"].item() for _ in range(2) for batch in loader]
    data = ordered(feed, order)
    assert [sample["x"] for sample in data.__getitems__(range(10))] == expected
    assert [data[index]["x"] for index in range(10)] == expected


def of_random(**options: Any) -> Ordered:
    return ordered(range(63), RandomSampler(63, seed=0), **options)


PK = PKBatchSampler(LABELS, p=4, k=2, seed=0)
REFUSED: Refused = [
    (lambda _: of_random(start=-1), ValueError, "start must be at least 0, got -1"),
    (lambda _: of_random(start=1.0), TypeError, "start must be an integer, got 1.0"),
    (lambda _: of_random(start=True), TypeError, "start must be an integer"),
    (lambda _: of_random(start=2**62), ValueError, "start must be below"),
    (lambda _: of_random(start=2**70), ValueError, "start must be below"),
    (lambda _: of_random(start=126, epochs=2), ValueError, "start must be below 126"),
    (lambda _: of_random(epochs=0), ValueError, "epochs must be at least 1"),
    (lambda _: of_random(epochs=2**60), ValueError, "epochs must be below"),
    (lambda _: of_random(epochs=1).shard(0, 2), ValueError, "2 ranks cannot divide 63 records"),
    (lambda _: of_random().shard(0, 2).shard(0, 2), ValueError, "this is rank 0 of 2: shard only"),
    (lambda _: of_random().shard(2, 2), ValueError, "rank must be below 2"),
    (lambda _: of_random()[-1], IndexError, "an index must be in"),
    (lambda _: of_random()[2**62], IndexError, "an index must be in"),
    (lambda _: of_random(epochs=1)[63], IndexError, r"must be in \[-63, 63\), got \[63\]"),
    (lambda _: of_random()[0.5], TypeError, "an index must be an integer"),
    (lambda _: of_random().__getitems__([0, 2**80]), TypeError, "an index must be an integer"),
    (lambda _: of_random().__getitems__([3, 1]), ValueError, "turn its shuffle off"),
    (lambda _: of_random().__getitems__([3, 3]), ValueError, "turn its shuffle off"),
    (lambda _: ordered(range(64), RandomSampler(63, seed=0)), ValueError, "64 .*sampler 63"),
    (lambda _: ordered(PK, PK), TypeError, "dataset must have items, got a PKBatchSampler"),
    (lambda _: ordered("ab", RandomSampler(2, seed=0)), TypeError, "items, got a str"),
    (lambda _: ordered(range(63), [1]), TypeError, "twinfeed.samplers, got a list: write ordered"),
    (lambda _: ordered(range(63)), TypeError, "twinfeed.samplers, got a NoneType"),
    (lambda _: ordered(range(90), PK, start=4), ValueError, "start=4 is within a batch of 8"),
    (lambda _: ordered(range(90), PK.shard(0, 2)), ValueError, "ordered|all ranks.*shard"),
    (lambda _: ordered(range(90), PK).shard(0, 8), ValueError, "got world_size=8, p=4"),
    (
        lambda _: ordered(range(63), RandomSampler(63, seed=0).shard(0, 3)),
        ValueError,
        "sampler must be that of all ranks",
    ),
    (
        lambda _: ordered(range(9), BatchSampler(RandomSampler(9, seed=0), batch_size=4)),
        ValueError,
        r"got sizes \[1, 4\] in epoch 0 .*last_batch='drop'",
    ),
    (
        lambda _: ordered(range(9), ExactOnceBatchSampler(9, batch_size=4, last_batch="pad")),
        TypeError,
        "not record ids",
    ),
    (
        lambda _: ordered(range(4), ReuseSampler(4, reuse=2, live=2, seed=0)),
        TypeError,
        "not record ids",
    ),
    (lambda _: ordered([], RandomSampler(0, seed=0)), ValueError, "an epoch must have an id"),
    (
        lambda _: ordered(Feed({"n": np.arange(90)}, PK, batch_transform=lambda b, s: b)),
        ValueError,
        "batch_transform needs whole batches",
    ),
    (lambda _: TorchDistributedSampler(PK, 0, 2), TypeError, "got a PKBatchSampler"),
]


@pytest.mark.parametrize(("call", "kind", "word"), REFUSED)
def test_bad_arguments_are_refused(call: Call, kind: type[Exception], word: str) -> None:
    with pytest.raises(kind, match=word):
        call(None)


@pytest.mark.parametrize(
    "shuffled",
    [
        lambda data: torch.randperm(len(data)),
        lambda data: list(range(len(data))),
        lambda data: next(iter(DataLoader(data, 4, shuffle=True))),
        lambda data: next(iter(TorchRandomSampler(data))),
        lambda data: next(iter(DistributedSampler(data, 2, 0))),
        lambda data: next(iter(DistributedSampler(data, 2, 0, shuffle=False))),
    ],
)
def test_host_that_shuffles_fails_at_once(shuffled: Callable[[Ordered], Any]) -> None:
    with pytest.raises((RuntimeError, MemoryError, OverflowError)):
        shuffled(of_random())


def test_shuffle_of_finite_dataset_is_an_error() -> None:
    with pytest.raises(ValueError, match="turn its shuffle off"):
        next(iter(DataLoader(of_random(epochs=2), 8, shuffle=True)))


class Shrinking(Dataset[int]):
    """A dataset that loses records while it is read."""

    length = 63

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, record: int) -> int:
        if record >= self.length:
            raise IndexError("list index out of range")
        return record


def test_dataset_that_shrinks_is_an_error_in_a_loop_too() -> None:
    source = Shrinking()
    data = ordered(source, RandomSampler(63, seed=0))
    data.__getitems__(range(63))
    source.length = 5
    with pytest.raises(LoaderError, match="its length is 5 now, and the sampler has 63 records"):
        for _ in data:
            pass
    with pytest.raises(LoaderError, match="list index out of range"):
        data.__getitems__(range(63, 100))


def batches(data: Ordered, size: int, count: int, **options: Any) -> Sequence[Any]:
    return [*islice(DataLoader(data, size, **options), count)]


def warned(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


def test_second_pass_warns_once() -> None:
    data = of_random()
    loader = DataLoader(data, 8)
    assert warned(lambda: [*islice(loader, 3)]) == []
    (message,) = warned(lambda: [*islice(loader, 3), *islice(loader, 3)])
    assert message.startswith("the host reads index 0 after 23, so records come twice")


def test_second_pass_by_single_items_warns() -> None:
    data = of_random()
    assert warned(lambda: [data[0], data[0], data[5], data[1]]) == []
    data = of_random()
    (message,) = warned(lambda: [data[i % 20] for i in range(40)])
    assert message.startswith("the host reads index 0 after 19")


def test_looking_at_items_does_not_warn() -> None:
    data = of_random()
    batches(data, 8, 3)
    assert warned(lambda: [data[0], data[1], data[0]]) == []
    assert warned(lambda: data.ids(range(8))) == []


def write_warnings(path: Path, _: int) -> None:
    """Have a worker write the text of each warning to a file."""

    def write(message: Any, *_: Any, **__: Any) -> None:
        with path.open("a") as file:
            print(message, file=file)

    warnings.simplefilter("always")
    warnings.showwarning = write


@pytest.mark.parametrize("persistent", [False, True])
def test_second_pass_of_workers_warns(persistent: bool, tmp_path: Path) -> None:
    """Also of workers that are started anew, which have read nothing."""
    path = tmp_path / "warnings"
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent}
    loader = DataLoader(of_random(), 8, worker_init_fn=partial(write_warnings, path), **options)
    delivered = [[batch.tolist() for batch in islice(loader, 4)] for _ in range(2)]
    assert delivered[0] == delivered[1]
    messages = path.read_text().splitlines()
    assert 1 <= len(messages) <= 2  # once a worker
    assert all("so records come twice" in message for message in messages)


def test_host_that_skips_although_start_is_set_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    data = of_random(start=16)
    (message,) = warned(lambda: data.__getitems__(range(16, 24)))
    assert message.startswith("the host begins at index 16, and start=16 skips records already")
    assert warned(lambda: of_random().__getitems__(range(16, 24))) == []
    monkeypatch.setenv("WORLD_SIZE", "3")  # of which this may be the last
    assert warned(lambda: of_random(start=16).__getitems__(range(16, 24))) == []
    assert len(warned(lambda: of_random(start=48).shard(0, 3).__getitems__(range(16, 24)))) == 1


def test_batch_that_cuts_a_batch_of_sampler_warns() -> None:
    def read(size: int) -> list[str]:
        return warned(lambda: batches(ordered(range(90), PK), size, 8))

    assert [len(read(size)) for size in (2, 4, 6, 8, 16, 12)] == [0, 0, 1, 0, 0, 1]
    assert "batch of 6 is no part of a batch of 8" in read(6)[0]


def test_endless_sampler_has_slices_of_ordered() -> None:
    for sampler, start in ((PK, 24), (RandomSampler(63, seed=0), 50)):
        whole = ordered(range(sampler.num_records), sampler, start=start)
        for world_size in (1, 2, 4):
            for rank in range(world_size):
                endless = EndlessSampler(sampler, start=start, rank=rank, world_size=world_size)
                assert isinstance(endless, torch.utils.data.Sampler)
                part = whole.shard(rank, world_size)
                ids = [*islice(pickle.loads(pickle.dumps(endless)), 3000)]
                assert ids == part.ids(range(3000)).tolist()
                assert len(endless) == part.epoch_length


def test_second_iterator_of_endless_sampler_warns() -> None:
    endless = EndlessSampler(PK)
    first = [*islice(endless, 3)]
    with pytest.warns(UserWarning, match="begins at start=0 again"):
        assert [*islice(endless, 3)] == first


@pytest.mark.parametrize("uneven", ["drop", "keep"])
def test_torch_distributed_sampler_is_a_rank(uneven: Any) -> None:
    order: Sampler = RandomSampler(63, seed=0)
    ranks = [TorchDistributedSampler(order, rank, 2, uneven=uneven) for rank in range(2)]
    for epoch in (0, 3, 4):
        for number, rank in enumerate(ranks):
            assert isinstance(rank, DistributedSampler)
            rank.set_epoch(epoch)
            ids = order.ids(epoch, np.arange(62 if uneven == "drop" else 63))[number::2].tolist()
            assert (list(rank), len(rank)) == (ids, len(ids))
