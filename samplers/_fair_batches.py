"""The fair P x K stream: groups of classes, then groups of records of each."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers.class_order import ClassOrder
from twinfeed.samplers.drawing.batch_shape import BatchShape, Phase
from twinfeed.samplers.drawing.deduplicate import mend
from twinfeed.samplers.drawing.fair_groups import FairGroups
from twinfeed.samplers.drawing.fifo_cache import Recent
from twinfeed.samplers.drawing.int_arrays import Int64
from twinfeed.samplers.drawing.interleave import Pattern
from twinfeed.samplers.drawing.random_words import derive, root_key
from twinfeed.samplers.mapped import pieces

_PIECE = 1 << 18  # classes that are drawn at once where a stretch begins
_AHEAD = 8  # draws of a class that are looked through at once for a record that is free


class FairDraw:
    """Draw the batches of any global steps.

    Each step belongs to one super-class, in a periodic pattern; without super-labels all classes
    are one super-class. The classes of a super-class come in fair groups of P, one group a turn. A
    class's draw number is its lap in the stream of groups. The draw number numbers the class's
    groups of K records: fair groups, or with `stored` a walk in a circle in stored order.
    """

    by_class = False  # whether the numbers of classes are drawn, in place of records

    def __init__(
        self,
        classes: ClassOrder,
        supers: ClassOrder | None,
        shape: BatchShape,
        seed: int,
        stored: bool,
        names: NDArray[Any] | None = None,
    ) -> None:
        # names: the label of each class, if records are of several classes
        self._classes, self._supers, self._shape = classes, supers, shape
        self._stored, self._names = stored, names
        self._keys = {of: root_key(seed, f"pk {of}") for of in ("super", "class", "record")}
        self._recent: Recent[_Walks] = Recent(2)
        self._walks(shape.stretches[0])  # made here, so that the first batch comes at once

    def _walks(self, stretch: Phase) -> _Walks:
        return self._recent.get(stretch, lambda: _Walks(stretch, self))

    def ids(self, steps: Int64, rank: int, world_size: int) -> Int64:
        """Return one rank's slices of the batches of consecutive global steps, end to end."""
        runs = self._shape.runs(steps)
        return np.concatenate([self._run(s, run, rank, world_size) for s, run in runs])

    def _run(self, stretch: Phase, steps: Int64, rank: int, world_size: int) -> Int64:
        """Draw steps of one stretch: classes, each class's draw number, then its records."""
        walks, k = self._walks(stretch), stretch.k
        share = stretch.p // world_size
        own = slice(rank * share, (rank + 1) * share)
        turns = walks.pattern.turns(steps - stretch.p_start)
        if self.by_class:
            number, _ = walks.classes(*turns, own.start, own.stop)
            ids = number.reshape(-1, 1).repeat(k, axis=1)
        elif self._names is None:
            number, draw = walks.classes(*turns, own.start, own.stop)
            ids = self._records(walks, number.reshape(-1), draw.reshape(-1), k)
        else:  # which records a rank gets depends on all classes of the batch
            number, draw = walks.classes(*turns, 0, stretch.p)
            ids = self._apart(walks, number, draw, k)[:, own].reshape(-1, k)
        if not self._shape.lowest_k:
            return ids.reshape(-1)
        ks = np.repeat(self._shape.ks(stretch, steps), share)
        return ids[np.arange(k) < ks[:, None]]

    def _records(self, walks: _Walks, number: Int64, draw: Int64, k: int) -> Int64:
        """Return the k records of each class and draw, int64[rows, k]."""
        if walks.records is None:
            size = np.asarray(self._classes.sizes)[number]
            member = (draw[:, None] * k + np.arange(k)) % size[:, None]
        else:
            member = walks.records.groups(number, draw)
        return self._classes._ids(number[:, None], member)

    def _apart(self, walks: _Walks, number: Int64, draw: Int64, k: int) -> Int64:
        """Return the records of whole batches, int64[turns, p, k], none twice in a batch."""
        assert self._names is not None
        ids = self._records(walks, number.reshape(-1), draw.reshape(-1), k)
        ids = ids.reshape(*number.shape, k)
        rising = np.sort(ids.reshape(len(ids), -1), axis=1)
        for turn in np.flatnonzero((rising[:, 1:] == rising[:, :-1]).any(axis=1)):
            order = np.argsort(np.asarray(self._classes.sizes)[number[turn]], kind="stable")
            row = mend(ids[turn], order, partial(self._later, walks, number[turn], draw[turn], k))
            if row is not None:
                names = self._names[number[turn]].tolist()
                raise ValueError(f"class {names[row]} of {names} has no {k} free records: lower k")
        return ids

    def _later(self, walks: _Walks, number: Int64, draw: Int64, k: int, row: int) -> Iterator[int]:
        """Yield the records that the next draws of a batch's class take, until all have come."""
        for first in range(1, 2 * int(self._classes.sizes[number[row]]) // k + 3, _AHEAD):
            draws = draw[row] + np.arange(first, first + _AHEAD)
            ids = self._records(walks, np.full(_AHEAD, number[row]), draws, k)
            yield from ids.reshape(-1).tolist()


class _Walks:
    """The walks of one stretch: the class stream, and the records' walks from its start."""

    def __init__(self, stretch: Phase, draw: FairDraw) -> None:
        keys, self._supers, self._p = draw._keys, draw._supers, stretch.p
        within = np.asarray(draw._classes.sizes)
        self._sizes = np.array([len(within)]) if self._supers is None else self._supers.sizes
        weights = self._sizes // np.gcd.reduce(self._sizes)
        self.pattern = Pattern(weights, derive(keys["super"], stretch.p_start))
        self._groups = FairGroups(self._sizes, stretch.p, derive(keys["class"], stretch.p_start))
        key = derive(keys["record"], stretch.start)
        self.records = None if draw._stored else FairGroups(within, stretch.k, key)
        self._begin(stretch.start - stretch.p_start, len(within))

    def classes(self, group: Int64, number: Int64, low: int, high: int) -> tuple[Int64, Int64]:
        """Return classes, and how often the stretch drew each before: int64[turns, high - low].

        A turn is given by its super-class and the super-class's own number of the turn.
        """
        place = number[:, None] * self._p + np.arange(low, high)
        classes = self._groups.groups(group, number, low, high)
        if self._supers is not None:
            classes = self._supers._ids(group[:, None], classes)
        draw = place // self._sizes[group][:, None] - self._laps[group][:, None]
        if self._early is not None:
            draw -= self._early[classes >> 3] >> (classes & 7) & 1
        return classes, draw

    def _begin(self, turns: int, classes: int) -> None:
        """Note what the class stream drew in its first `turns`, before the stretch."""
        sizes, given = self._sizes, self.pattern.given(turns)
        self._laps = given * self._p // sizes  # whole laps of each super-class
        self._early: NDArray[np.uint8] | None = None  # a bit a class: drawn in the begun lap
        if not turns:
            return
        first = self._laps * sizes // self._p  # the super-class's own turn in which this lap begins
        stops = np.cumsum(given - first)
        early = np.zeros(classes, np.bool_)
        for some in pieces(int(stops[-1]), _PIECE // self._p + 1):
            turn = np.arange(some.start, some.stop)
            group = np.searchsorted(stops, turn, side="right")
            drawn, draw = self.classes(group, given[group] - stops[group] + turn, 0, self._p)
            early[drawn[draw == 0]] = True
        self._early = np.packbits(early, bitorder="little")
