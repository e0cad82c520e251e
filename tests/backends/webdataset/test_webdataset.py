"""Samples through a pipeline of webdataset: the stream's batches, dealt, tracked and resumed."""

import copy
import json
import pickle
import traceback
from collections import deque
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import webdataset as wds
from support.refusals import Call, Refused, check_refused
from support.sampler_cases import FED
from support.shards import write_tar
from torch.utils.data import DataLoader

from twinfeed.loaders import (
    DatasetSource,
    Feed,
    Index,
    LoaderError,
    NumpyLoader,
    build_index,
    pack,
)
from twinfeed.loaders.torch import TorchLoader
from twinfeed.loaders.webdataset import SampleLoader, samples
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    RandomSampler,
    ReuseSampler,
    SequentialSampler,
    StateMismatchError,
)

RECORDS = 103
WORKERS = [(0, None), (2, "fork")]
SLOW = [pytest.param(2, how, marks=pytest.mark.long) for how in ("forkserver", "spawn")]


@cache
def index_of(records: int) -> Index:
    rows = [{"txt": b"%d" % n, "json": b"{}"} for n in range(records)]
    return pack(rows, mkdtemp(), container="tar", shard_bytes=40_000)["data"]


def feed_of(sampler: BatchStream | None = None, **options: Any) -> Feed:
    sampler = sampler or BatchSampler(RandomSampler(RECORDS, seed=1), batch_size=12)
    return Feed(index_of(sampler.num_records), sampler, **options)


def web_loader(source: SampleLoader, workers: int = 0, how: str | None = None) -> wds.WebLoader:
    """A loader as a user of webdataset writes it."""
    size = source._sampler.batch_size
    stages = wds.decode(), wds.to_tuple("txt"), wds.map(first), cut(size)
    pipeline = wds.DataPipeline(source, *stages)
    options = {"multiprocessing_context": how} if workers else {}
    return wds.WebLoader(pipeline, batch_size=None, num_workers=workers, **options)


def cut(size: int, **options: Any) -> Any:
    return wds.batched(size, collation_fn=list, **options)


def first(texts: tuple[str]) -> int:
    return int(texts[0])


def run(source: SampleLoader, *options: Any, epochs: int = 1) -> list[list[int]]:
    loader = web_loader(source, *options)
    return [list(batch) for _ in range(epochs) for batch in source.track(loader)]


def streamed(feed: Feed, epochs: int = 1) -> list[list[int]]:
    loader = NumpyLoader(feed)
    return [[int(text) for text in batch["txt"]] for _ in range(epochs) for batch in loader]


@pytest.mark.filterwarnings("ignore:.*unclosed file:ResourceWarning")  # by webdataset
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_samples_equal_samples_of_webdataset() -> None:
    index = index_of(RECORDS)
    shards = sorted(str(path) for path in Path(index.root).glob("*.tar"))
    assert len(shards) > 1
    pipeline = wds.DataPipeline(wds.SimpleShardList(shards), wds.tarfile_to_samples())
    own = {sample["__key__"]: sample for sample in pipeline}
    drawn = [sample for batch in samples(feed_of()) for sample in batch]
    assert drawn == [own[sample["__key__"]] for sample in drawn]
    assert len(drawn) == len(own) == RECORDS


SMALL = [(name, make) for name, make in FED if make().num_records < 1000]


@pytest.mark.parametrize("make", [make for _, make in SMALL], ids=[name for name, _ in SMALL])
def test_every_sampler_gives_its_stream_or_is_refused(make: Callable[[], BatchStream]) -> None:
    feed = feed_of(make())
    traits, sizes = feed.sampler.traits, [len(ids) for ids in feed.sampler.batches(0, 0, len(feed))]
    if traits.padded or traits.max_cached is not None:
        with pytest.raises(ValueError, match="cannot have padding, reuse"):
            samples(feed)
    elif set(sizes[:-1]) - {feed.sampler.batch_size}:
        source = samples(feed)
        with pytest.raises(ValueError, match=r"batches of .* samples"):
            run(source)
    else:
        source = samples(feed)
        assert run(source, epochs=1) == streamed(feed)
        assert source.epoch == (not feed.sampler.evaluation)


@pytest.mark.filterwarnings("ignore:.*unclosed file:ResourceWarning")  # by webdataset
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["{}", "class {}"])
def test_label_member_is_in_sample(tmp_path: Path, name: str) -> None:
    rows = [(f"{n:03}", {"txt": b"", "cls": name.format(n % 3).encode()}) for n in range(12)]
    path = write_tar(tmp_path / "a.tar", rows)
    index = build_index(str(path), tmp_path / "a.index", label="cls")
    feed = Feed(index, BatchSampler(SequentialSampler(12), batch_size=4))
    own = wds.DataPipeline(wds.SimpleShardList(str(path)), wds.tarfile_to_samples())
    assert [sample for batch in samples(feed) for sample in batch] == list(own)


@pytest.mark.parametrize(("workers", "how"), [*WORKERS, *SLOW])
def test_ranks_and_workers_give_batches_of_stream(workers: int, how: str | None) -> None:
    feed, started_anew = feed_of(), how in ("forkserver", "spawn")
    for ranks in (3,) if started_anew else (1, 3, 2):
        for rank in range(1 if started_anew else ranks):
            part = feed.shard(rank, ranks)
            assert run(samples(part), workers, how, epochs=2) == streamed(part, 2)


@pytest.mark.parametrize(("workers", "how"), WORKERS)
def test_saved_and_resumed_at_every_step(workers: int, how: str | None) -> None:
    """On 1 rank, 3 and 2 in turn; and with the state of a TorchLoader, and the other way."""
    feed = feed_of(BatchSampler(RandomSampler(36, seed=1), batch_size=12))
    whole = streamed(feed, 3)
    for stop in range(7):
        source, state, got = samples(feed), {}, []
        for _ in range(3 if stop else 0):
            for batch in source.track(web_loader(source, workers, how)):
                got.append(list(batch))
                if len(got) == stop:
                    state = json.loads(json.dumps(source.state_dict()))
                    break
            if state:
                break
        state = state or source.state_dict()
        assert got == whole[:stop]
        if stop % 3:
            later = samples(feed)
            later.load_state_dict(state)
            assert run(later, workers, how) == whole[stop : stop + 3 - stop % 3]
        for ranks in (3, 2):
            sources = [samples(feed.shard(rank, ranks)) for rank in range(ranks)]
            for part in sources:
                part.load_state_dict(state)
            parts = [next(iter(part.track(web_loader(part)))) for part in sources]
            assert [id_ for part in parts for id_ in part] == whole[stop]
        torch_loader = TorchLoader(feed, device="cpu")
        torch_loader.load_state_dict(state)
        assert [int(text) for text in next(iter(torch_loader))["txt"]] == whole[stop]
        source.load_state_dict(torch_loader.state_dict())
        assert source.global_step == stop + 1


def test_evaluation_gives_every_record_in_plain_data_loader() -> None:
    feed = feed_of(ExactOnceBatchSampler(RECORDS, batch_size=10))
    source = samples(feed)
    pipeline = wds.DataPipeline(source, wds.to_tuple("txt"), wds.map(first))
    for workers in (0, 2):
        loader = DataLoader(pipeline, batch_size=10, num_workers=workers)
        got = [batch.tolist() for batch in source.track(loader)]
        assert got == streamed(feed)
        assert source.epoch == source.step == 0


def test_feed_transform_gets_seeds_of_stream() -> None:
    feed = feed_of(transform=lambda sample: {"seen": float(sample["seed"] >> 40)})
    source = samples(feed)
    loader = wds.WebLoader(source_pipeline(source), batch_size=None, num_workers=2)
    got = [list(batch) for batch in source.track(loader)]
    assert got == [batch["seen"].tolist() for batch in NumpyLoader(feed)]


def source_pipeline(source: SampleLoader) -> wds.DataPipeline:
    return wds.DataPipeline(source, wds.map(lambda sample: sample["seen"]), cut(12))


def test_copies_and_pickles_continue_at_position() -> None:
    source = samples(feed_of())
    next(source.track(web_loader(source)))
    for other in (copy.copy(source), pickle.loads(pickle.dumps(source))):
        assert run(other) == streamed(feed_of())[1:]


def tracked(stages: Callable[[SampleLoader], Any]) -> list[Any]:
    source = samples(feed_of())
    return list(source.track(stages(source)))


def persistent(source: SampleLoader) -> wds.WebLoader:
    pipeline = wds.DataPipeline(source, cut(12))
    return wds.WebLoader(pipeline, batch_size=None, num_workers=1, persistent_workers=True)


def twice(source: SampleLoader) -> None:
    loader = persistent(source)
    for _ in range(2):
        list(source.track(loader))


def pipe(source: SampleLoader, *stages: Any) -> wds.DataPipeline:
    return wds.DataPipeline(source, *stages)


REUSE = BatchSampler(ReuseSampler(24, reuse=2, live=12, seed=0), batch_size=12)
PADDED = ExactOnceBatchSampler(RECORDS, batch_size=12, last_batch="pad")
REFUSED: Refused = [
    (lambda _: samples(feed_of(REUSE)), ValueError, "reuse of decoded"),
    (lambda _: samples(feed_of(PADDED)), ValueError, "cannot have padding"),
    (lambda _: samples(feed_of(batch_transform=lambda batch, seed: batch)), ValueError, "TorchLo"),
    (lambda _: samples(index_of(RECORDS)), TypeError, "Feed"),
    (lambda _: samples(["a.tar"]), TypeError, "Feed"),
    (
        lambda _: samples(
            Feed(DatasetSource({"x": np.arange(RECORDS)}), feed_of().sampler),
        ),
        TypeError,
        "Index",
    ),
    # A rank's batches of 11 and 12, and one of none.
    (lambda _: run(samples(feed_of().shard(0, 5))), ValueError, "batches of [12] to 3"),
    (
        lambda _: run(samples(feed_of(ExactOnceBatchSampler(5, batch_size=4)).shard(1, 2))),
        ValueError,
        "batches of 0 to 2",
    ),
    # What a pipeline does to the stream.
    (lambda _: tracked(lambda source: pipe(source, cut(8))), ValueError, "_batched took 9.*gave 1"),
    (
        lambda _: tracked(lambda source: pipe(source, cut(24))),
        ValueError,
        "_batched took 25.*gave 1",
    ),
    (lambda _: tracked(pipe), ValueError, "gave more.*batched.12"),
    (
        lambda _: tracked(lambda source: pipe(source, cut(12, partial=False))),
        ValueError,
        "9 batches, but the pipeline gave 8",
    ),
    (lambda _: tracked(lambda source: []), ValueError, "gave 0"),
    (lambda _: tracked(lambda source: pipe(source, cut(12)).repeat()), RuntimeError, "rep"),
    (
        lambda _: tracked(lambda source: pipe(source, cut(12)).with_epoch(20)),
        RuntimeError,
        "with_epoch",
    ),
    (lambda _: next(iter(pipe(samples(feed_of())))), RuntimeError, "source.track.loader."),
]


@pytest.mark.parametrize(("call", "kind", "word"), REFUSED)
def test_webdataset_refuses_bad_arguments(
    tmp_path: Path, call: Call, kind: type[Exception], word: str
) -> None:
    index_of(RECORDS)
    check_refused(tmp_path, call, kind, word)


Good = Callable[[dict[str, Any]], bool]


def failing(good: Good) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if not good(sample):
            raise ValueError("a damaged image")
        return sample

    return fail


def own_stage(good: Good) -> Callable[[Any], Any]:
    def only_good(data: Any) -> Any:
        yield from filter(good, data)

    return only_good


def number(sample: dict[str, Any]) -> int:
    return int(sample["txt"])


DROPPING: dict[str, Callable[[Good], Any]] = {
    "_select": wds.select,
    "_map": lambda good: wds.map(lambda sample: sample if good(sample) else None),
    "_map ": lambda good: wds.map(failing(good), handler=wds.ignore_and_continue),
    "only_good": own_stage,
}


@pytest.mark.parametrize("name", DROPPING)
@pytest.mark.parametrize(("workers", "place"), [(0, 0), (0, 11), (0, 102), (2, 30)])
def test_stage_that_drops_a_sample_is_named_with_it(name: str, workers: int, place: int) -> None:
    """Before any batch that is not the stream's, wherever in its epoch the sample comes."""
    feed = feed_of()
    source, got, bad = (
        samples(feed),
        list[list[int]](),
        [n for batch in streamed(feed) for n in batch][place],
    )
    stage = DROPPING[name](lambda sample: int(sample["__key__"]) != bad)
    pipeline = wds.DataPipeline(source, wds.decode(), stage, wds.map(number), cut(12))
    loader = wds.WebLoader(pipeline, batch_size=None, num_workers=workers)

    def train() -> None:
        for batch in source.track(loader):
            got.append(list(batch))

    error = of_worker(train)
    assert isinstance(error, ValueError)
    assert f"the stage {name.strip()} took" in str(error)
    assert got == streamed(feed)[: len(got)]
    assert source.step == len(got) <= place // 12


@pytest.mark.parametrize("name", DROPPING)
@pytest.mark.parametrize("place", [0, 2])
def test_stage_that_drops_a_batch_of_one_sample_is_named(name: str, place: int) -> None:
    """`batched` is one sample ahead, and no other stage may be."""
    feed = feed_of(BatchSampler(SequentialSampler(len(feed_of().index)), batch_size=1))
    source, got = samples(feed), list[Any]()
    stage = DROPPING[name](lambda sample: sample["__key__"] != feed.index.keys([place])[0])
    pipeline = wds.DataPipeline(source, stage, wds.to_tuple("txt"), wds.batched(1))
    with pytest.raises(ValueError, match=f"the stage {name.strip()} took"):
        got.extend(source.track(pipeline))
    assert source.step == len(got) <= place


def test_stages_of_ones_own_that_keep_samples_are_taken() -> None:
    """A lazy one, one that makes batches, and one of batches; in a second pass too."""

    def batches(data: Any) -> Any:
        while batch := list(islice(data, 12)):
            yield batch

    source = samples(feed_of())
    stages = (wds.map(number), lambda data: (n for n in data), batches, wds.map(list))
    pipeline = wds.DataPipeline(source, *stages)
    assert [batch for _ in range(2) for batch in source.track(pipeline)] == streamed(feed_of(), 2)


def read_ahead(data: Any) -> Any:
    """Keep seven samples in flight, as a stage of threads does."""
    pending = deque[Any]()
    for sample in data:
        pending.append(sample)
        if len(pending) > 7:
            yield pending.popleft()
    yield from pending


def test_stage_that_reads_ahead_is_named() -> None:
    """Though it gives as many as it takes: their order would not be known."""
    source = samples(feed_of())
    pipeline = wds.DataPipeline(source, read_ahead, wds.decode(), wds.map(number), cut(12))
    with pytest.raises(ValueError, match="the stage read_ahead took 8 samples and gave 1"):
        list(source.track(pipeline))


def test_stage_that_swaps_samples_is_named() -> None:
    """Though it gives as many as it takes."""

    def swap(data: Any) -> Any:
        for first in data:
            yield from [*islice(data, 1), first]

    feed = feed_of()
    source = samples(feed)
    pipeline = wds.DataPipeline(source, swap, wds.map(number), cut(12))
    with pytest.raises(ValueError, match="from sample 2 of the pass on: the stage swap took 2"):
        list(source.track(pipeline))


def of_worker(call: Callable[[], Any]) -> Exception:
    """Return the error that a call raises, without its frames, which would keep the workers."""
    try:
        call()
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        return error.with_traceback(None)
    raise AssertionError("nothing was raised")


def test_webdataset_refuses_workers_that_persist() -> None:
    error = of_worker(lambda: twice(samples(feed_of())))
    assert isinstance(error, RuntimeError)
    assert "persistent_workers" in str(error)


def test_states_of_other_streams_and_records_are_refused() -> None:
    state = samples(feed_of()).state_dict()
    for other in (
        feed_of(BatchSampler(RandomSampler(RECORDS, seed=2), batch_size=12)),
        feed_of(BatchSampler(RandomSampler(RECORDS, seed=1), batch_size=6)),
    ):
        with pytest.raises(StateMismatchError):
            samples(other).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_shard_error_names_record(tmp_path: Path, workers: int) -> None:
    rows = [{"txt": b"%d" % n} for n in range(24)]
    index = pack(rows, tmp_path, container="tar")["data"]
    (path,) = tmp_path.glob("*.tar")
    data = bytearray(path.read_bytes())
    data[int(index.table("txt")["offset"][7])] ^= 1
    path.write_bytes(data)
    feed = Feed(index, BatchSampler(RandomSampler(24, seed=0), batch_size=6))
    error = of_worker(lambda: run(samples(feed), workers, "fork"))
    assert isinstance(error, LoaderError)
    assert "record 7" in str(error)


def test_pass_after_break_continues_after_received_batches() -> None:
    source, whole = samples(feed_of()), streamed(feed_of())
    loader = web_loader(source, 2, "fork")
    assert [list(batch) for batch in islice(source.track(loader), 4)] == whole[:4]
    assert [list(batch) for batch in source.track(loader)] == whole[4:]
