"""Draw the epochs of all ranks, for each number of ranks."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from warnings import catch_warnings, simplefilter

import numpy as np

from twinfeed.loaders.audit.evidence import Evidence
from twinfeed.loaders.audit.maker import Maker
from twinfeed.loaders.audit.promises import Promises
from twinfeed.loaders.audit.rank_processes import draw_by_processes
from twinfeed.loaders.audit.streams import Pass, StoppedError

Ranks = list[list[Pass]]  # [rank][epoch]


def draw_evidence(maker: Maker, promises: Promises, not_asked: dict[str, str]) -> Evidence:
    """Draw all worlds. Those that cannot be drawn are added to `not_asked`.

    Raises:
        StoppedError: a sampler that takes the rank, or that has one rank, cannot be drawn from.
    """
    # What `make` imports is then there, before states are compared. An error comes again below.
    with suppress(StoppedError), maker.running("make"):
        maker.build(rank=0, world_size=1, epoch=0)
    drawn: dict[int, Ranks] = {}
    for world_size in promises.worlds:
        if world_size == 1 or "rank" in maker.takes:
            drawn[world_size] = _draw_ranks(maker, promises, world_size)
            continue
        try:
            with catch_warnings():
                simplefilter("ignore")
                ranks, again = (_draw_ranks(maker, promises, world_size) for _ in range(2))
        except StoppedError as error:
            reason = str(error)
        else:
            if not all(map(_are_equal, ranks, again)):
                reason = "make takes no rank, and two samplers that are built alike differ"
            elif all(_are_equal(passes, ranks[0]) for passes in ranks):
                reason = "make takes no rank, and the sampler asks for none"
            else:
                drawn[world_size] = ranks
                continue
        not_asked[f"{world_size} ranks"] = reason
    if not drawn:
        raise StoppedError(f"ranks differ in nothing, or fail: {not_asked}")
    return _as_evidence(maker, promises, drawn)


def _draw_ranks(maker: Maker, promises: Promises, world_size: int) -> Ranks:
    """Draw the epochs of each rank, in this process or in one for each."""
    epochs = range(promises.epochs)
    if promises.processes and world_size > 1:
        return draw_by_processes(maker, epochs, world_size, promises.max_seconds)
    return [maker.passes(epochs, rank, world_size) for rank in range(world_size)]


def _are_equal(passes: list[Pass], first: list[Pass]) -> bool:
    return all(np.array_equal(a.ids, b.ids) for a, b in zip(passes, first, strict=False))


def _as_evidence(maker: Maker, promises: Promises, drawn: dict[int, Ranks]) -> Evidence:
    """Return the streams as epochs, of a known number of records."""
    every = [drawn_pass for ranks in drawn.values() for passes in ranks for drawn_pass in passes]
    endless, num_records = not all(p.ended for p in every), promises.num_records
    if num_records is None and endless:
        raise StoppedError(f"no end came after {promises.most:,} ids: pass num_records=")
    if num_records is None:
        num_records = 1 + max((int(p.ids.max(initial=-1)) for p in every), default=-1)
    if endless:
        drawn = {
            world_size: _divided(ranks, promises.epochs, num_records)
            for world_size, ranks in drawn.items()
        }
    return Evidence(maker, promises, drawn, endless, num_records)


def _divided(ranks: Ranks, epochs: int, num_records: int) -> Ranks:
    """Divide endless streams into epochs: id i of rank r is number i * world_size + r of all."""
    world_size, divided = len(ranks), []
    for rank, passes in enumerate(ranks):
        ends = [max(0, -(-(e * num_records - rank) // world_size)) for e in range(epochs + 1)]
        divided.append([passes[0].window(*pair) for pair in pairwise(ends)])
    return divided
