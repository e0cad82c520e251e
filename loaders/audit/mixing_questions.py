"""Questions of classes and mixing, where labels or a promise are declared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from twinfeed.loaders.audit.evidence import Evidence, of_ranks
from twinfeed.loaders.audit.report import Answer, note
from twinfeed.loaders.audit.streams import NotAskedError, Pass
from twinfeed.samplers import diagnose
from twinfeed.samplers.types import Int64s

_FEWEST = 50  # records of which mixing is asked


def ask_classes(evidence: Evidence) -> Iterator[Answer]:
    """Count the classes of a batch, their records, and the records that come twice."""
    labels = evidence.promises.labels
    if labels is None:
        raise NotAskedError("no labels were passed")
    if evidence.passes[0].sizes is None and not evidence.promises.batch_size:
        raise NotAskedError("single ids come, and no batch_size was passed")
    if not len(labels) or evidence.all_ids.max(initial=-1) >= len(labels):
        raise NotAskedError("ids have no labels")
    have = np.bincount(labels)
    for world_size, ranks in evidence.streams.items():
        shapes: Counter[tuple[int, str]] = Counter()
        doubles = avoidable = 0
        for drawn in (drawn for passes in ranks for drawn in passes):
            for batch in _batches(drawn, evidence.promises.batch_size):
                shape, repeated = _shape(labels[batch], batch, have)
                shapes[shape] += 1
                doubles += bool(repeated)
                avoidable += repeated == 2
        if not shapes:
            continue
        (classes, records), most = shapes.most_common(1)[0]
        total = shapes.total()
        uneven = most < total or "to" in records
        yield note(
            f"{of_ranks(world_size)}: {most:,} of {total:,} batches hold {classes} classes of "
            f"{records}; {doubles:,} hold a record twice, {avoidable:,} of them needlessly",
            fault=evidence.expects("pk") and uneven,
        )
    ids = np.concatenate([drawn.ids for passes in ranks for drawn in passes])
    times = np.bincount(labels[ids[ids >= 0]], minlength=len(have))
    yield note(
        f"each is drawn {times.min():,} to {times.max():,} times in {len(ranks[0])} epochs, and "
        f"has {have.min():,} to {have.max():,} records"
    )


def _batches(drawn: Pass, batch_size: int | None) -> Iterator[Int64s]:
    """Yield the batches of a pass, without padding; single ids are divided by `batch_size`."""
    if drawn.sizes is None:
        stops = np.arange(batch_size or 1, len(drawn.ids), batch_size or 1)
    else:
        stops = np.cumsum(drawn.sizes)[:-1]
    for batch in np.split(drawn.ids, stops):
        if len(real := batch[batch >= 0]):
            yield real


def _shape(labels: Int64s, batch: Int64s, have: Int64s) -> tuple[tuple[int, str], int]:
    """Return how many classes a batch has, and of how many records each, such as "4" or "2 to 4".

    The second number is 0 if no record comes twice, 2 if a class has enough records to avoid it.
    """
    classes, counts = np.unique(labels, return_counts=True)
    first = np.unique(batch, return_index=True)[1]
    distinct = np.bincount(labels[first], minlength=len(have))[classes]
    low, high = counts.min(), counts.max()
    repeated = int((distinct < counts).any())
    avoidable = int(((distinct < counts) & (have[classes] >= counts)).any())
    return (len(classes), f"{low}" if low == high else f"{low} to {high}"), repeated + avoidable


def ask_mixing(evidence: Evidence) -> Iterator[Answer]:
    """Whether an epoch is as mixed as a uniform shuffle: the findings of `diagnose`."""
    drawn = evidence.passes[0]
    ids = drawn.ids[(drawn.ids >= 0) & (drawn.ids < evidence.num_records)]
    if evidence.world_size > 1:
        raise NotAskedError("add 1 to world_size")
    if len(ids) < _FEWEST:
        raise NotAskedError(f"an epoch has fewer than {_FEWEST} records")
    if evidence.is_stored_order or evidence.expects("pk", "evaluation"):
        raise NotAskedError("no uniform shuffle is promised")
    size = 32 if drawn.sizes is None else int(drawn.sizes.max())
    diagnosis = diagnose(
        ids,
        batch_size=min(evidence.promises.batch_size or size, len(ids)),
        num_records=evidence.num_records,
        labels=evidence.promises.labels,
    )
    bad = not diagnosis.ok and evidence.expects("training")
    yield note("; ".join(diagnosis.findings) or "as in a uniform shuffle", fault=bad)
