"""A `tf.data.Dataset` of the batches of a sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy.typing as npt
import tensorflow as tf

from twinfeed.loaders._system import processors
from twinfeed.loaders.collate import Collate, FieldSpec
from twinfeed.loaders.feed import Decode, Feed
from twinfeed.loaders.index import Index
from twinfeed.loaders.tensorflow.choose import ChooseIds
from twinfeed.loaders.tensorflow.files import ChooseFiles
from twinfeed.loaders.tensorflow.gather import Gather
from twinfeed.loaders.tensorflow.passes import Passes
from twinfeed.loaders.tensorflow.pipeline import Engine, batches_of
from twinfeed.loaders.tensorflow.serve import Server
from twinfeed.samplers import BatchStream

EngineName = Literal["gather", "choose_from_datasets"]
Sources = Literal["shards", "classes", "files"]


def make_dataset(
    index: Index,
    sampler: BatchStream,
    /,
    *,
    engine: EngineName = "gather",
    sources: Sources = "shards",
    context: tf.distribute.InputContext | None = None,
    fields: Sequence[str] | None = None,
    decode: Decode | None = None,
    transform: Decode | None = None,
    collate: Collate = "stack",
    side: Mapping[str, npt.NDArray[Any]] | None = None,
    spec: Mapping[str, FieldSpec] | None = None,
    verify: bool = True,
    prefetch: int = 2,
    threads: int | None = None,
) -> tf.data.Dataset:
    """Make a dataset of the batches of `sampler`, read from `index`.

    Each pass over it is one epoch of exactly `len(sampler)` batches, which its cardinality says;
    shapes are static where they can be, the batch's too where all batches are of one size.
    The epoch is the sampler's: it advances when a pass has delivered its last batch, so that a
    peek at a batch costs nothing, and `sampler.set_epoch` sets it. (What is prefetched behind this
    dataset counts as delivered; `Position` counts what the loop received.) A sampler restored in
    mid-epoch gives the remainder of that epoch, and nothing else, and then stands at the start of
    the next, for which another dataset is made.

    Byte fields come as `tf.string`, to be decoded in TensorFlow operations (`map`), or `decode`
    makes arrays of them. `fields`, `decode`, `transform`, `collate`, `side`, `spec` and `verify`
    are those of `Feed`; `threads` (default: the processors this process may use, at most 8) read
    and decode whole batches, `prefetch` of which are kept ready.

    `engine="gather"` reads each batch by its ids. `engine="choose_from_datasets"` lets the
    sampler choose from datasets; the batches are the same. `sources="shards"` or `"classes"` are
    datasets of ids, one for each shard or class, for any sampler and container.
    `sources="files"` reads TFRecord shards with TensorFlow's own reader, from front to back:
    for streams that meet the records of a file, or of a block of one, in stored order.

    `context`, within `strategy.distribute_datasets_from_function`, gives each replica its slice of
    every global batch: whole classes of a P×K batch, and each record exactly once.

    Raises ValueError when the sampler was made for another number of records, and where
    `sources` does not fit: files that are no TFRecords, or more of them at once than this process
    may open; P×K over several ranks, between which class files would move.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> dataset = make_dataset(index, ExactOnceBatchSampler(3, batch_size=2))
    >>> len(dataset), [batch["word"].numpy().tolist() for batch in dataset]
    (2, [[b'to', b'be'], [b'or']])
    """
    if engine not in ("gather", "choose_from_datasets"):
        raise ValueError(f"engine must be 'gather' or 'choose_from_datasets', got {engine!r}")
    if sources not in ("shards", "classes", "files"):
        raise ValueError(f"sources must be 'shards', 'classes' or 'files', got {sources!r}")
    if threads is None:
        threads = _default_threads()
    if threads < 1 or prefetch < 0:
        raise ValueError(
            f"threads must be at least 1 and prefetch at least 0, got {threads} and {prefetch}"
        )
    feed = Feed(
        index,
        sampler,
        fields=fields,
        decode=decode,
        transform=transform,
        collate=collate,
        side=side,
        spec=spec,
        verify=verify,
    )
    ranks = [sampler] if context is None else _ranks(sampler, context)
    server = Server(feed, ranks, threads)
    passes = Passes(sampler)
    batches = batches_of(_engine(server, engine, sources), passes.begin, passes.end, prefetch)
    length = (len(sampler) - passes.start) * len(ranks)
    return batches.apply(tf.data.experimental.assert_cardinality(length))


def _default_threads() -> int:
    """The processors this process may use, at most 8."""
    return min(8, processors())


def _ranks(sampler: BatchStream, context: tf.distribute.InputContext) -> list[BatchStream]:
    """The replicas that one input pipeline feeds: it gives each its batch in turn."""
    own, over = divmod(context.num_replicas_in_sync, context.num_input_pipelines)
    if over:
        raise ValueError(
            f"{context.num_replicas_in_sync} replicas cannot be shared out evenly "
            f"over {context.num_input_pipelines} input pipelines"
        )
    first = context.input_pipeline_id * own
    return [sampler.shard(first + n, context.num_replicas_in_sync) for n in range(own)]


def _engine(server: Server, engine: EngineName, sources: Sources) -> Engine:
    """Make the engine that the names stand for."""
    if engine == "gather":
        return Gather(server)
    if len(server.ranks) > 1:
        raise ValueError(
            f"engine='choose_from_datasets' serves one replica for each input pipeline, "
            f"got {len(server.ranks)}: use engine='gather'"
        )
    return ChooseFiles(server) if sources == "files" else ChooseIds(server, sources)
