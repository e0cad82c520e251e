"""Samples for a pipeline of webdataset: the only module that imports webdataset."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from twinfeed.loaders.feed.request import requests
from twinfeed.loaders.formats.records import Sample
from twinfeed.loaders.index.index import Index, check_index
from twinfeed.loaders.loop.feed_loader import FeedLoader
from twinfeed.loaders.loop.loader import Loader
from twinfeed.loaders.loop.selector import Choices, SourceOf
from twinfeed.loaders.making.feed import Feed, check_feed, compile_feed
from twinfeed.loaders.making.samples import Samples, samples_of
from twinfeed.loaders.support.extras import requires_extra
from twinfeed.samplers import BatchStream, validate

with requires_extra("twinfeed.loaders.webdataset", "webdataset"):
    from webdataset.utils import pytorch_worker_info

__all__ = ["SampleLoader", "choose_samples", "samples"]


class SampleLoader(Loader[list[Sample]]):
    """The first stage of a `wds.DataPipeline`, and the position of what the pipeline delivers.

    `samples` and `choose_samples` return it. `track(loader)` iterates over the pipeline or its
    `WebLoader`, and counts the batches that the loop receives. Nothing else knows the position, as
    pipelines and their workers read ahead. State, `set_epoch` and passes are those of every
    `Loader`. Iterating over the object itself gives each batch as a list of samples.

    Worker n of W makes each W-th batch from batch n on. A `WebLoader` asks the workers in turn, and
    so delivers the batches of the stream.

    >>> import webdataset as wds
    >>> from tempfile import mkdtemp
    >>> from twinfeed import BatchSampler, Feed, SequentialSampler, pack
    >>> words = [{"txt": word} for word in (b"to", b"be", b"or", b"not")]
    >>> index = pack(words, mkdtemp(), container="tar")["data"]
    >>> source = samples(Feed(index, BatchSampler(SequentialSampler(4), batch_size=2)))
    >>> pipeline = wds.DataPipeline(source, wds.decode(), wds.to_tuple("txt"), wds.batched(2))
    >>> for (words,) in source.track(pipeline):
    ...     print(words, source.epoch, source.step)
    ['to', 'be'] 0 1
    ['or', 'not'] 1 0
    """

    _counting_advice = "loop over source.track(loader)"
    _next_pass: tuple[int, int] | None = None  # of the pass that track has begun

    def __call__(self) -> Iterator[Sample]:
        """Return the samples of the pass that `track` has started; in a worker, its part of them.

        Raises:
            RuntimeError: `track` has not begun a pass, or this process has its samples already.
        """
        if self._next_pass is None:
            raise RuntimeError(
                "a pass of a pipeline begins with source.track(loader), once: loop over it, "
                "without repeat(), with_epoch() and persistent_workers=True"
            )
        (epoch, start), self._next_pass = self._next_pass, None
        return chain.from_iterable(self._start_pass(epoch, start))

    def track(self, loader: Iterable[Any], /) -> Iterator[Any]:
        """Iterate over a pipeline or a `WebLoader` of this source, and count its batches.

        Raises:
            ValueError: batches of this rank differ in size, before the last one: a pipeline cuts
                equal ones. In the pass: `loader` gives more or fewer batches than the stream has.
        """
        self._end_pass_and_tracking()
        epoch, start = self._cursor.start_pass()
        self._check_sizes(epoch, start)
        self._next_pass = epoch, start
        self.meter.start(start)
        yield from self._iterate_pass(
            self._counted(loader, len(self) - start), self._count_received
        )

    def _check_sizes(self, epoch: int, start: int) -> None:
        """Raise ValueError unless all batches of a pass have the sampler's batch size.

        The last one may be smaller, but not empty. A pipeline can only make equal batches.
        """
        sampler = self._sampler
        lows, highs = sampler.rank_slices(epoch, start, len(sampler))
        sizes = highs - lows
        if (sizes[:-1] != sampler.batch_size).any() or (sizes[-1:] == 0).any():
            raise ValueError(
                f"a pipeline cuts equal batches, and rank {sampler.rank} of {sampler.world_size} "
                f"has batches of {sizes.min()} to {sizes.max()} samples: take a batch size that "
                f"the ranks divide, last_batch='drop', or a TorchLoader"
            )

    def _counted(self, loader: Iterable[Any], expected: int) -> Generator[Any, None, None]:
        """Yield the batches of a pipeline or its `WebLoader`.

        Raises:
            ValueError: it does not have the `expected` number of batches.
        """
        number = 0
        try:
            for number, batch in enumerate(loader, 1):
                if number > expected:
                    break
                yield batch
        finally:
            self._next_pass = None
        if number != expected:
            found = "more" if number > expected else number
            raise ValueError(
                f"the pass must have {expected} batches, the pipeline gave {found}: cut them by "
                f"batched({self._sampler.batch_size}), and leave out stages that drop, repeat or "
                f"split samples"
            )


def samples(feed: Feed, /, *, ledger: str | os.PathLike[str] | None = None) -> SampleLoader:
    """Return a source of samples for a `wds.DataPipeline`, in the order of a feed's stream.

    A sample is webdataset's own: `__key__`, `__url__`, and the bytes of each field by its
    extension. The member `cls` has the label, if the index has labels. With `decode` or `transform`
    of the feed, a sample has what these return. The stages `decode`, `to_tuple`, `map` and
    `batched` stay what they are. `shuffle`, `split_by_node` and `split_by_worker` go: the stream is
    shuffled, and `feed.shard` deals it to ranks.

    Args:
        feed: over an index; its `collate` is that of the stage `batched`.
        ledger: a file that says which steps the loop has received: see `Ledger`.

    Raises:
        ValueError: padding, the reuse of decoded images, and `batch_transform`, which need the
            batches of a loader.

    >>> from tempfile import mkdtemp
    >>> from twinfeed import BatchSampler, Feed, SequentialSampler, pack
    >>> index = pack([{"txt": b"to"}, {"txt": b"be"}], mkdtemp(), container="tar")["data"]
    >>> source = samples(Feed(index, BatchSampler(SequentialSampler(2), batch_size=1)))
    >>> [[sample["txt"] for sample in batch] for batch in source]
    [[b'to'], [b'be']]
    """
    index: Any = check_feed(feed).index
    check_index(index)
    traits = feed.sampler.traits
    if traits.padded or traits.max_cached is not None or feed.batch_transform is not None:
        raise ValueError(
            "samples have no padding, no reuse of decoded images and no batch_transform: take a "
            "TorchLoader for these"
        )
    return _FeedSamples(feed, checksums=True, readahead=0, ledger=ledger)


class _FeedSamples(SampleLoader, FeedLoader[list[Sample]]):
    """The batches of a feed, each a list of samples as webdataset has them."""

    def _changed_feed(self, sampler: BatchStream) -> Feed:
        raise ValueError("workers draw by themselves: make samples that load the state instead")

    def _start_pass(self, epoch: int, start: int) -> Generator[list[Sample], None, None]:
        """Yield the samples of each batch from step `start` on; a worker of W, each W-th batch."""
        feed, index = self.feed, self.feed.index
        assert isinstance(index, Index)
        _, _, worker, workers = pytorch_worker_info()
        pipeline = Samples(compile_feed(feed), self.reader)
        coming = requests(self.schedules.of(feed.sampler), epoch, start, seeds=feed.seeded)
        for request in islice(coming, worker, None, workers):
            shards = [index.location(record)[0] for record in request.records.tolist()]
            members: dict[str, Iterable[Any]] = {
                "__key__": index.keys(request.records),
                "__url__": [f"{index.root}/{shard}" for shard in shards],
            }
            if index.has_labels:
                labels = index.labels[request.records].tolist()
                names = map(index.classes.__getitem__ if index.classes else str, labels)
                members["cls"] = [name.encode() for name in names]
            members.update(pipeline.field_values(request, pipeline.table_rows(request)))
            yield samples_of(members)


def choose_samples(
    sampler: BatchStream,
    pipelines: Sequence[Iterable[Sample]],
    /,
    *,
    source: SourceOf | None = None,
    replay: bool = False,
    ledger: str | os.PathLike[str] | None = None,
) -> SampleLoader:
    """Let a sampler choose from pipelines: one for each class, or each set.

    Each sample is the next one of its pipeline. A pass restarts each pipeline. So pipelines must
    go on for an epoch: most need `repeat()`. One process draws from all of them: a `WebLoader` over
    what is chosen has `num_workers=0`.

    Args:
        sampler: draws classes (`PKBatchSampler.of_classes`) or sets (`MixtureSampler`).
        pipelines: a `wds.DataPipeline`, `WebDataset` or `WebLoader` each.
        source: the number of the pipeline of each sample id, as for `Selector`.
        replay: whether a pass skips as many samples of each pipeline as were drawn before its
            position, in all epochs. Then a resumed run is exact, if the pipelines are
            deterministic. Without `replay` the choice alone resumes.
        ledger: a file that says which steps the loop has received: see `Ledger`.

    Raises:
        ValueError: a sampler that needs to know each record, as for `Selector`. In a pass: a
            pipeline has ended.

    >>> from twinfeed import PKBatchSampler
    >>> pipelines = [[{"txt": f"{name}{n}"} for n in range(9)] for name in "abc"]
    >>> source = choose_samples(PKBatchSampler.of_classes(3, p=2, k=2, seed=0), pipelines)
    >>> [sample["txt"] for sample in next(iter(source))]
    ['b0', 'b1', 'a0', 'a1']
    """
    pipelines = list(pipelines)
    if any(isinstance(pipeline, (str, Iterator)) for pipeline in pipelines):
        raise TypeError("a pipeline must begin anew in each pass: give a DataPipeline, no iterator")
    choices = Choices(sampler, len(pipelines), source)
    replay = validate.flag("replay", replay)
    return _ChosenSamples(choices, pipelines, replay=replay, ledger=ledger)


class _ChosenSamples(SampleLoader):
    """The samples that a sampler chooses from pipelines."""

    def __init__(
        self, choices: Choices, pipelines: list[Iterable[Sample]], *, replay: bool, **options: Any
    ) -> None:
        super().__init__(choices.sampler, **options)
        self._choices, self._pipelines, self._replay = choices, pipelines, replay

    def _start_pass(self, epoch: int, start: int) -> Generator[list[Sample], None, None]:
        """Yield batches from step `start` on; each sample is the next one of its pipeline."""
        if pytorch_worker_info()[3] > 1:
            raise RuntimeError("each worker would draw from all pipelines: give num_workers=0")
        iterators = [iter(pipeline) for pipeline in self._pipelines]
        if self._replay:  # skip the samples that were drawn before this position
            for iterator, count in zip(iterators, self._choices.drawn(epoch, start), strict=True):
                next(islice(iterator, count, count), None)
        steps = chain.from_iterable(self._choices.chunks(epoch, start, len(self)))
        for step, numbers in enumerate(steps, start):
            batch: list[Any] = [next(iterators[number], None) for number in numbers]
            if None in batch:
                raise ValueError(
                    f"pipeline {numbers[batch.index(None)]} (of {len(iterators)}) has ended in "
                    f"step {step} of epoch {epoch}: add repeat() to it, or lower batches_per_epoch"
                )
            yield batch
