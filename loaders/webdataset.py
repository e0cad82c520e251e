"""Samples for a pipeline of webdataset: the only module that imports webdataset."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

from twinfeed.loaders.batches.batcher import Batcher, samples_of
from twinfeed.loaders.batches.feed import Feed, recipe_of, require_feed
from twinfeed.loaders.formats.records import Sample
from twinfeed.loaders.index.index import Index, check_index
from twinfeed.loaders.loop.feed_loader import FeedLoader
from twinfeed.loaders.support.extras import requires_extra

with requires_extra("twinfeed.loaders.webdataset", "webdataset"):
    from webdataset import DataPipeline
    from webdataset.utils import pytorch_worker_info

__all__ = ["SampleLoader", "samples"]


class SampleLoader(FeedLoader[list[Sample]]):
    """The first stage of a `wds.DataPipeline`, which also counts the batches that a loop receives.

    `samples` returns it. `track(loader)` iterates over the pipeline or its
    `WebLoader`, and counts the batches that the loop receives. Nothing else has the position,
    since pipelines and their workers read ahead. State, `set_epoch` and passes work as in every
    `Loader`. Iterating over the object itself gives each batch as a list of samples.

    Of 3 workers, worker 1 makes batches 1, 4, 7, … of the stream. A `WebLoader` takes one batch
    from each worker in turn, and so delivers the batches in the order of the stream.

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
    # The (epoch, step) of the pass that `track` has started; `__call__` takes it, once.
    _next_pass: tuple[int, int] | None = None

    def __call__(self) -> Iterator[Sample]:
        """Return the samples of the pass that `track` has started; in a worker, only its part."""
        if self._next_pass is None:
            raise RuntimeError(
                "each pass over a pipeline must be started by source.track(loader): loop over it, "
                "without repeat(), with_epoch() and persistent_workers=True"
            )
        (epoch, start), self._next_pass = self._next_pass, None
        return chain.from_iterable(self._start_pass(epoch, start))

    def _start_pass(self, epoch: int, start: int) -> Generator[list[Sample], None, None]:
        """Yield each batch as a list of samples; of 3 workers, worker 1 yields batches 1, 4, 7."""
        feed, index = self.feed, self.feed.index
        assert isinstance(index, Index)
        _, _, worker, num_workers = pytorch_worker_info()  # 0 and 1 in the main process
        batcher = Batcher(recipe_of(feed), reader=self.reader)
        # A request says which samples a batch has: their record ids, and if the feed has a
        # transform (`seeded`), a random seed for each.
        all_requests = self.schedule.requests(epoch, start, seeds=feed.seeded)
        for request in islice(all_requests, worker, None, num_workers):
            shards = [index.location(record)[0] for record in request.records.tolist()]
            # The values of all samples of the batch, for each key of a sample.
            values: dict[str, Iterable[Any]] = {
                "__key__": index.keys(request.records),
                "__url__": [f"{index.root}/{shard}" for shard in shards],
            }
            if index.has_labels:
                labels = index.labels[request.records].tolist()
                names = map(index.classes.__getitem__ if index.classes else str, labels)
                values["cls"] = [name.encode() for name in names]
            # For the transform: the samples' rows of the columns of the index, and of the side
            # tables, which are arrays of the user with a row for each sample (`side` of `Feed`).
            table_rows = batcher.table_rows(request)
            values.update(batcher.field_values(request, table_rows))
            yield samples_of(values)

    def track(self, loader: Iterable[Any], /) -> Iterator[Any]:
        """Iterate over a pipeline or a `WebLoader` that reads from this object; count its batches.

        The pass starts at the position (epoch, step) of this object, and goes to the end of the
        epoch. Each batch moves the position to the next step. The user has made the pipeline with
        this object as its source of samples, so the calls are in this order: `track` notes where
        the pass starts, and iterates over the pipeline; the pipeline calls this object; `__call__`
        yields the samples from there on.

        Raises:
            ValueError: the batches of this rank differ in size (except for a smaller last batch),
                but a pipeline can only make batches of one size; or, while iterating, `loader`
                gives more or fewer batches than the epoch has, or a stage drops a sample.
        """
        epoch, start = self._new_pass()
        self._check_sizes(epoch, start)
        self._check_stages(loader)
        # For `__call__`, which the pipeline calls when `_iterate_pass` iterates over it, below.
        self._next_pass = epoch, start
        batches = self._check_count(loader, len(self) - start)
        yield from self._iterate_pass(batches, self.run.received)

    def _check_sizes(self, epoch: int, start: int) -> None:
        """Raise ValueError unless all batches of this rank, but the last, have one size."""
        sampler = self._sampler
        starts, stops = sampler.rank_slices(epoch, start, len(sampler))  # within the global batch
        sizes = stops - starts
        if (sizes[:-1] != sampler.batch_size).any() or (sizes[-1:] == 0).any():
            raise ValueError(
                f"a pipeline makes batches of one size, but rank {sampler.rank} of "
                f"{sampler.world_size} has batches of {sizes.min()} to {sizes.max()} samples: set "
                f"last_batch='drop' or a multiple of {sampler.world_size} as batch size, or use "
                f"TorchLoader"
            )

    def _check_stages(self, loader: Any) -> None:
        """Replace the stages of the pipeline in place by checked ones, which workers get too."""
        while loader is not None and loader is not self:
            if isinstance(loader, DataPipeline):
                first, *stages = loader.pipeline or [None]
                if first is self:
                    stages = [s.stage if isinstance(s, _CheckedStage) else s for s in stages]
                    size = self._sampler.batch_size
                    loader.pipeline = [self, *(_CheckedStage(size, stage) for stage in stages)]
                loader = first
            else:  # a DataLoader, which a WebLoader has as its first stage
                loader = getattr(loader, "dataset", None)

    def _check_count(self, loader: Iterable[Any], expected: int) -> Generator[Any, None, None]:
        """Yield the batches of a pipeline; raise ValueError unless there are `expected`."""
        count = 0
        try:
            for count, batch in enumerate(loader, 1):
                if count > expected:
                    break
                yield batch
        finally:
            self._next_pass = None
        if count != expected:
            actual = "more" if count > expected else count
            raise ValueError(
                f"the pass must have {expected} batches, but the pipeline gave {actual}: make them "
                f"by batched({self._sampler.batch_size}), and remove stages that drop, repeat or "
                f"split samples"
            )


class _CheckedStage(NamedTuple):
    """A lazy stage of a pipeline: it gives one sample for each, or one batch for `batch_size`."""

    batch_size: int
    stage: Any

    def __call__(self, data: Iterable[Any]) -> Iterator[Any]:
        """Run the stage, and compare what it takes with what it gives."""
        size, inputs, outputs, ended = self.batch_size, 0, 0, False
        # `batched` gives a batch when it takes the first sample of the next one. Of batches of one
        # sample, any other stage would be ahead by the sample that it drops.
        leads = (0, 1) if size > 1 or self._name == "_batched" else (0,)

        def counted() -> Iterator[Any]:
            nonlocal inputs, ended
            for item in data:
                inputs += 1
                yield item
            ended = True

        for outputs, item in enumerate(DataPipeline().invoke(self.stage, counted()), 1):
            if inputs > outputs and inputs - outputs * size not in leads and not ended:
                raise self._error(inputs, outputs)
            yield item
        if inputs > outputs and outputs not in (inputs // size, -(-inputs // size)):
            raise self._error(inputs, outputs)

    @property
    def _name(self) -> str:
        """The name of the stage's function: `_batched` of the stage `batched`."""
        return getattr(getattr(self.stage, "f", self.stage), "__name__", repr(self.stage))

    def _error(self, inputs: int, outputs: int) -> ValueError:
        """Return the error for a stage that drops samples, reads ahead, or makes other batches."""
        return ValueError(
            f"batches are not the stream's from sample {inputs} of the pass on: the stage "
            f"{self._name} took {inputs} samples and gave {outputs}: remove stages that drop, "
            f"shuffle or read ahead (select, handler=), leave records out by the sampler, and make "
            f"batches by batched({self.batch_size})"
        )


def samples(feed: Feed, /) -> SampleLoader:
    """Return a source of samples for a `wds.DataPipeline`, in the order of a feed's stream.

    A sample is a dict as in webdataset: `__key__`, `__url__`, and the bytes of each field by its
    extension. The member `cls` has the label, if the index has labels. With `decode` or `transform`
    of the feed, a sample has the values that these return. The stages `decode`, `to_tuple`, `map`
    and `batched` of a pipeline need no change. Remove `shuffle`, `split_by_node` and
    `split_by_worker`: the stream is shuffled, and `feed.shard` gives each rank its part.

    Args:
        feed: a feed over an index. Its `collate` is not used: the stage `batched` collates.

    Raises:
        ValueError: the feed has padding, reuses decoded images, or has a `batch_transform`, which
            all need the batches of a loader.

    >>> from tempfile import mkdtemp
    >>> from twinfeed import BatchSampler, Feed, SequentialSampler, pack
    >>> index = pack([{"txt": b"to"}, {"txt": b"be"}], mkdtemp(), container="tar")["data"]
    >>> source = samples(Feed(index, BatchSampler(SequentialSampler(2), batch_size=1)))
    >>> [[sample["txt"] for sample in batch] for batch in source]
    [[b'to'], [b'be']]
    """
    index: Any = require_feed(feed).index
    check_index(index)
    traits = feed.sampler.traits
    if traits.padded or traits.max_cached is not None or feed.batch_transform is not None:
        raise ValueError(
            "samples cannot have padding, reuse of decoded images or a batch_transform: use a "
            "TorchLoader for these"
        )
    return SampleLoader(feed, readahead=0)
