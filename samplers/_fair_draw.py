"""The fair P x K stream: groups of classes, then groups of records of each."""

from __future__ import annotations

import numpy as np

from twinfeed.samplers._bits import Int64, derive, root_key, spread
from twinfeed.samplers._fair import FairGroups, Pattern
from twinfeed.samplers._memo import Recent
from twinfeed.samplers._schedule import Schedule, Stretch
from twinfeed.samplers.class_order import ClassOrder


class FairDraw:
    """Draw the batches of any global steps.

    Each step belongs to one super-class, in a periodic pattern; without super-labels all classes
    are one super-class. The classes of a super-class come in fair groups of P, one group a turn. A
    class's draw number is its lap in the stream of groups. The draw number numbers the class's
    groups of K records: fair groups, or with `stored` a walk in a circle in stored order.
    """

    def __init__(
        self, classes: ClassOrder, supers: ClassOrder, schedule: Schedule, seed: int, stored: bool
    ) -> None:
        self._classes, self._supers, self._schedule = classes, supers, schedule
        self._stored = stored
        self._keys = {of: root_key(seed, f"pk {of}") for of in ("super", "class", "record")}
        self._recent: Recent[_Walks] = Recent(2)
        self._walks(schedule.stretches[0])  # made here, so that the first batch comes at once

    def _walks(self, stretch: Stretch) -> _Walks:
        return self._recent.get(stretch, lambda: _Walks(stretch, self))

    def ids(self, steps: Int64, rank: int, world_size: int) -> Int64:
        """Return one rank's slices of the batches of consecutive global steps, end to end."""
        runs = self._schedule.runs(steps)
        return np.concatenate([self._run(s, run, rank, world_size) for s, run in runs])

    def _run(self, stretch: Stretch, steps: Int64, rank: int, world_size: int) -> Int64:
        """Draw steps of one stretch: classes, each class's draw number, then its records."""
        walks, k = self._walks(stretch), stretch.k
        share = stretch.p // world_size
        turns = walks.pattern.turns(steps - stretch.p_start)
        number, lap = walks.classes(*turns, rank * share, (rank + 1) * share)
        draw = (lap - walks.drawn[number]).reshape(-1)
        number = number.reshape(-1)
        if walks.records is None:
            size = self._classes.sizes[number]
            member = (draw[:, None] * k + np.arange(k)) % size[:, None]
        else:
            member = walks.records.groups(number, draw)
        ids = self._classes._ids(number[:, None], member)
        if not self._schedule.lowest_k:
            return ids.reshape(-1)
        ks = np.repeat(self._schedule.ks(stretch, steps), share)
        return ids[np.arange(k) < ks[:, None]]


class _Walks:
    """The walks of one stretch: the class stream, and the records' walks from its start."""

    def __init__(self, stretch: Stretch, draw: FairDraw) -> None:
        keys, self._supers, self._p = draw._keys, draw._supers, stretch.p
        sizes = self._supers.sizes
        weights = sizes // np.gcd.reduce(sizes)
        self.pattern = Pattern(weights, derive(keys["super"], stretch.p_start))
        self._groups = FairGroups(sizes, stretch.p, derive(keys["class"], stretch.p_start))
        key, within = derive(keys["record"], stretch.start), draw._classes.sizes
        self.records = None if draw._stored else FairGroups(within, stretch.k, key)
        self.drawn = self._drawn_before(stretch.start - stretch.p_start)

    def classes(self, group: Int64, number: Int64, low: int, high: int) -> tuple[Int64, Int64]:
        """Return classes and their laps, int64[turns, high - low].

        A turn is given by its super-class and the super-class's own number of the turn.
        """
        place = number[:, None] * self._p + np.arange(low, high)
        members = self._groups.groups(group, number, low, high)
        classes = self._supers._ids(group[:, None], members)
        return classes, place // self._supers.sizes[group][:, None]

    def _drawn_before(self, turns: int) -> Int64:
        """Return how often each class was drawn in the first `turns` of its stream."""
        sizes, given = self._supers.sizes, self.pattern.given(turns)
        whole = given * self._p // sizes
        owner, classes = self._supers._by_class()
        drawn = np.empty(len(owner), np.int64)
        drawn[classes] = whole[owner]
        first = whole * sizes // self._p  # the own turn in which the unfinished lap began
        group, turn = spread(given - first)
        classes, lap = self.classes(group, first[group] + turn, 0, self._p)
        drawn[classes[lap == whole[group][:, None]]] += 1
        return drawn
