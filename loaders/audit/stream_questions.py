"""Questions of what came. Marks of answers: "!" is a fault, "-" a fact, " " as it should be."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from twinfeed.loaders.audit.report import Mark
from twinfeed.loaders.audit.worlds import World
from twinfeed.samplers import diagnose

Answers = Iterator[tuple[Mark, str]]


def fault_if(is_fault: object) -> Mark:
    """Return the mark of a fault, or of a fact."""
    return "!" if is_fault else "-"


def ask_kind(world: World) -> Answers:
    """Whether single ids or batches come, and whether a pass ends."""
    text = "batches" if world.passes[0].batched else "single ids"
    ends = f"endless: {world.num_records:,} of all ranks are taken for an epoch"
    is_fault = world.expects("evaluation" if world.endless else "infinite")
    yield fault_if(is_fault), f"{text}; {ends if world.endless else 'each pass ends'}"


def ask_ids(world: World) -> Answers:
    """Whether all ids are record ids."""
    n = world.num_records
    for bad in world.ids[(world.ids >= n) | (world.ids < -1)][:1]:
        yield "!", f"{bad} is not in [0, {n}): pass ids=, if an item holds other numbers too"
    if (world.ids == -1).any():
        yield "-", "-1 comes, and is taken for padding"


def ask_length(world: World) -> Answers:
    """Whether `len` is what comes."""
    for rank, passes in enumerate(world.ranks):
        length, counts = passes[0].length, [*map(len, passes)]
        where = f", rank {rank}" if world.size > 1 else ""
        if length is None:
            yield "-", "there is none"
        elif isinstance(length, str):
            yield "!", f"raises {length}{where}"
        elif world.endless:
            yield "-", f"{length:,}, and no end came"
        elif [drawn.length for drawn in passes] != counts:
            yield "!", f"{length:,}, and {counts} came{where}"
        else:
            continue
        return
    yield " ", "is what comes"


def ask_ranks(world: World) -> Answers:
    """Whether all ranks have equally many batches in each epoch, as collectives need."""
    counts = np.array([[*map(len, sizes)] for sizes in world.sizes])  # [rank, epoch]
    unit, hang = "ids", ""
    if world.in_batches:
        unit, hang = "batches", ": a collective in each step would hang"
    for epoch in np.flatnonzero((counts != counts[0]).any(axis=0))[:1]:
        is_fault = world.in_batches and not world.expects("evaluation")
        yield fault_if(is_fault), f"{counts[:, epoch].tolist()} {unit} in epoch {epoch}{hang}"
        return
    yield " ", f"equally many {unit}"


def ask_coverage(world: World) -> Answers:
    """Whether each record comes once in each epoch, over all ranks."""
    extra, lost = np.maximum(world.counts - 1, 0).sum(axis=1), (world.counts == 0).sum(axis=1)
    epoch = int(np.maximum(extra, lost).argmax())  # the worst
    worst, times = max(extra[epoch], lost[epoch]), world.counts[epoch]
    if worst == 0:
        yield " ", "each record once in each epoch"
        return
    parts = [f"{extra[epoch]:,} too many (such as {times.argmax()})"] if extra[epoch] else []
    parts += [f"{lost[epoch]:,} missing (such as {times.argmin()})"] if lost[epoch] else []
    # Padding, or a dropped tail, is less than a batch of all ranks.
    is_tail = worst < world.step and not ((extra > 0) & (lost > 0)).any()
    text = f"epoch {epoch}: {' and '.join(parts)} of {world.num_records:,}"
    is_fault = world.expects("evaluation") or (world.expects("training") and not is_tail)
    yield fault_if(is_fault), f"{text}{', less than a step' if is_tail else ''}"


def ask_never(world: World) -> Answers:
    """Whether records never came, and whether the same are missing in many more epochs."""
    missing = world.counts == 0
    unseen = np.flatnonzero(missing.all(axis=0))
    always = (missing == missing[0]).all() and not (world.is_stored_order or missing.all())
    if always and len(unseen) and world.in_process and not world.endless:
        ranks = (world.draw(world.more_epochs, rank) for rank in range(world.size))
        always = not any(np.isin(p.ids, unseen).any() for passes in ranks for p in passes)
    if len(unseen):
        is_fault = world.expects("evaluation") or (world.expects("training") and always)
        text = f"{len(unseen):,} records never came in {len(missing)} epochs, such as"
        same = ": the same are missing in each" if always else ""
        yield fault_if(is_fault), f"{text} {unseen[:3].tolist()}{same}"


def ask_classes(world: World) -> Answers:
    """Count the classes of a batch, their records, and those that come twice needlessly."""
    ids = np.concatenate([drawn.ids for passes in world.ranks for drawn in passes])
    sizes = np.concatenate([sizes for rank in world.sizes for sizes in rank])
    batches = np.repeat(np.arange(len(sizes)), sizes)[ids >= 0]
    ids = ids[ids >= 0]
    labels, have = world.declared.labels[ids], np.bincount(world.declared.labels)
    pairs, counts = np.unique(batches * len(have) + labels, return_counts=True)
    of_batch, of_class = np.divmod(pairs, len(have))
    _, first = np.unique(batches * world.num_records + ids, return_index=True)
    distinct = np.unique((batches * len(have) + labels)[first], return_counts=True)[1]
    needless = (distinct < counts) & (have[of_class] >= counts)
    twice, avoidable = (len(np.unique(of_batch[is_so])) for is_so in (distinct < counts, needless))
    starts = np.flatnonzero(np.diff(of_batch, prepend=-1))
    extremes = np.minimum.reduceat(counts, starts), np.maximum.reduceat(counts, starts)
    shape = [np.diff(starts, append=len(pairs)), *extremes]  # of each batch
    shapes, times = np.unique(shape, axis=1, return_counts=True)
    classes, low, high = shapes[:, times.argmax()]
    is_fault = world.expects("pk") and (len(times) > 1 or low < high)
    records = f"{low}" if low == high else f"{low} to {high}"
    text = f"{times.max():,} of {len(starts):,} batches hold {classes} classes of {records}"
    text += f"; {twice:,} hold a record twice, {avoidable:,} of them needlessly"
    yield fault_if(is_fault), text
    if world.size > world.declared.world_sizes[0]:
        return
    times = np.bincount(labels, minlength=len(have))
    text = f"each is drawn {times.min():,} to {times.max():,} times in {len(world.passes)} epochs"
    yield "-", f"{text}, and has {have.min():,} to {have.max():,} records"


def ask_mixing(world: World) -> Answers:
    """Whether an epoch is as mixed as a uniform shuffle: the findings of `diagnose`."""
    ids, declared = world.passes[0].ids, world.declared
    ids = ids[(ids >= 0) & (ids < world.num_records)]
    size = min(world.step if world.in_batches else 32, len(ids))
    options = {"num_records": world.num_records, "labels": declared.labels}
    findings = diagnose(ids, batch_size=size, **options).findings
    is_fault = findings and world.expects("training")
    yield fault_if(is_fault), "; ".join(findings) or "as in a uniform shuffle"
