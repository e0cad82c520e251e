"""Questions of every stream: what it gives, its length, its ranks, and which records come."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from twinfeed.loaders.audit.evidence import Evidence, of_ranks
from twinfeed.loaders.audit.report import Answer, holds, note
from twinfeed.samplers.types import Array


def ask_kind(evidence: Evidence) -> Iterator[Answer]:
    """Whether single ids or batches come, and whether a pass ends."""
    kind = "single ids" if evidence.passes[0].sizes is None else "batches"
    if evidence.endless:
        text = f"{kind}; endless: {evidence.num_records:,} of all ranks are taken for an epoch"
        yield note(text, fault=evidence.expects("evaluation"))
    else:
        yield note(f"{kind}; each pass ends", fault=evidence.expects("infinite"))


def ask_ids(evidence: Evidence) -> Iterator[Answer]:
    """Whether all ids are record ids."""
    ids = evidence.all_ids
    bad = ids[(ids >= evidence.num_records) | (ids < -1)]
    if len(bad):
        yield note(
            f"{bad[0]} is not in [0, {evidence.num_records}): pass ids=, if an item holds other "
            "numbers too",
            fault=True,
        )
    if (ids == -1).any():
        yield note("-1 comes, and is taken for padding")


def ask_length(evidence: Evidence) -> Iterator[Answer]:
    """Whether `len` is what comes."""
    for world_size, ranks in evidence.streams.items():
        for rank, passes in enumerate(ranks):
            lengths, counts = [drawn.length for drawn in passes], [len(drawn) for drawn in passes]
            where = f", rank {rank} of {world_size}" if world_size > 1 else ""
            if lengths[0] is None:
                yield note("there is none")
            elif isinstance(lengths[0], str):
                yield note(f"raises {lengths[0]}{where}", fault=True)
            elif evidence.endless:
                yield note(f"{lengths[0]:,}, and no end came{where}")
            elif lengths != counts:
                yield note(f"{lengths[0]:,}, and {counts} came{where}", fault=True)
            else:
                continue
            return
    yield holds("is what comes")


def ask_ranks(evidence: Evidence) -> Iterator[Answer]:
    """Whether all ranks have equally many batches in each epoch, as collectives need."""
    for world_size, ranks in evidence.streams.items():
        if world_size == 1 or evidence.endless:
            continue
        batches = ranks[0][0].sizes is not None
        size = 1 if batches else evidence.promises.batch_size or 1
        unit = "batches" if batches or evidence.promises.batch_size else "ids"
        for epoch in range(min(map(len, ranks))):
            counts = [-(-len(passes[epoch]) // size) for passes in ranks]
            if len(set(counts)) > 1:
                hangs = unit == "batches"
                yield note(
                    f"{of_ranks(world_size)}: {counts} {unit} in epoch {epoch}"
                    + (": a collective in each step would hang" if hangs else ""),
                    fault=hangs and not evidence.expects("evaluation"),
                )
                break
        else:
            yield holds(f"{of_ranks(world_size)}: equally many {unit}")


def ask_coverage(evidence: Evidence) -> Iterator[Answer]:
    """Whether each record comes once in each epoch, over all ranks."""
    for world_size in evidence.streams:
        worst, text, both = 0, "each record once in each epoch", False
        for epoch, times in enumerate(evidence.counts(world_size)):
            repeated, missing = times > 1, times == 0
            extra, lost = int((times[repeated] - 1).sum()), int(missing.sum())
            both |= extra > 0 and lost > 0  # neither padding nor a dropped tail
            if max(extra, lost) > worst:
                worst = max(extra, lost)
                text = f"epoch {epoch}: {_numbers(extra, repeated, lost, missing)}"
        if worst == 0:
            yield holds(f"{of_ranks(world_size)}: {text}")
            continue
        is_tail = worst < _step(evidence, world_size) and not both
        bad = evidence.expects("evaluation") or (evidence.expects("training") and not is_tail)
        tail = ", less than a step" if is_tail else ""
        yield note(f"{of_ranks(world_size)}: {text} of {evidence.num_records:,}{tail}", fault=bad)


def _numbers(extra: int, repeated: Array, lost: int, missing: Array) -> str:
    """Return such as "2 too many (such as 7) and 1 missing (such as 9)"."""
    parts = [f"{extra:,} too many (such as {repeated.argmax()})"] if extra else []
    parts += [f"{lost:,} missing (such as {missing.argmax()})"] if lost else []
    return " and ".join(parts)


def _step(evidence: Evidence, world_size: int) -> int:
    """Return how many records a batch of all ranks has: a tail is shorter."""
    sizes = [passes[0].sizes for passes in evidence.streams[world_size]]
    largest = max((int(size.max(initial=1)) for size in sizes if size is not None), default=1)
    return world_size * (evidence.promises.batch_size or largest)


def ask_never(evidence: Evidence) -> Iterator[Answer]:
    """Whether there are records that never come, and ranks whose share never changes."""
    for world_size in evidence.streams:
        counts = list(evidence.counts(world_size))
        seen = np.sum(counts, axis=0) > 0
        if len(counts) < 2 or evidence.num_records == 0:
            continue
        if not seen.all():
            unseen, always = np.flatnonzero(~seen), _are_always_missing(evidence, world_size)
            bad = evidence.expects("evaluation") or (evidence.expects("training") and always)
            yield note(
                f"{of_ranks(world_size)}: {len(unseen):,} records never came in {len(counts)} "
                f"epochs, such as {unseen[:3].tolist()}"
                + (": the same are missing in each" if always else ""),
                fault=bad,
            )
        yield from _fixed_shares(evidence, world_size)


def _are_always_missing(evidence: Evidence, world_size: int) -> bool:
    """Return whether the same records are missing in each of so many epochs that it is no chance.

    A sampler in stored order drops the same tail each time, and an empty stream drops all.
    """
    counts = list(evidence.counts(world_size))
    missing = [times == 0 for times in counts]
    same = all(np.array_equal(missing[0], again) for again in missing)
    if not same or evidence.is_stored_order or missing[0].all() or not missing[0].any():
        return False
    if evidence.endless or (evidence.promises.processes and world_size > 1):
        return True
    epochs, lost = evidence.more_epochs(), np.flatnonzero(missing[0])
    for rank in range(world_size):
        passes = evidence.maker.passes(epochs, rank, world_size)
        if any(np.isin(drawn.ids, lost).any() for drawn in passes):
            return False
    return True


def _fixed_shares(evidence: Evidence, world_size: int) -> Iterator[Answer]:
    """Yield a note if a rank meets the same records in each epoch."""
    if world_size == 1 or evidence.is_stored_order or evidence.expects("evaluation"):
        return
    ranks = evidence.streams[world_size]
    own = min(len(np.unique(np.concatenate([drawn.ids for drawn in rank]))) for rank in ranks)
    if own <= -(-evidence.num_records // world_size):
        yield note(
            f"{of_ranks(world_size)}: a rank met only {own:,} records in {len(ranks[0])} epochs: "
            "its share never changes"
        )
