"""The fair P x K stream: groups of classes, then groups of records of each."""

from __future__ import annotations

import numpy as np

from twinfeed.samplers._bits import Int64, derive, root_key, spread
from twinfeed.samplers._classes import Classes
from twinfeed.samplers._fair import FairGroups, StoredGroups
from twinfeed.samplers._memo import Recent
from twinfeed.samplers._pattern import Pattern
from twinfeed.samplers._schedule import Schedule, Stretch


class FairDraw:
    """Draw the batches of any global steps.

    Each step belongs to one super-class, in a periodic pattern; without super-labels all classes
    are one super-class. The classes of a super-class come in fair groups of P, one group a turn. A
    class's draw number is its lap in the stream of groups. The draw number numbers the class's fair
    groups of K records.
    """

    def __init__(
        self, classes: Classes, supers: Classes, schedule: Schedule, seed: int, stored: bool
    ) -> None:
        self._classes, self._supers, self._schedule = classes, supers, schedule
        self._stored = stored
        names = ("super", "class", "record")
        self._keys = {name: root_key(seed, f"pk {name}") for name in names}
        self._recent: Recent[_Walks] = Recent(2)
        self._walks(schedule.stretches[0])  # made here, so that the first batch comes at once

    def _walks(self, stretch: Stretch) -> _Walks:
        """Return the walks of a stretch, made if need be."""
        return self._recent.get(stretch, lambda: _Walks(stretch, self))

    def ids(self, steps: Int64, rank: int, world_size: int) -> Int64:
        """Return one rank's slices of the batches of consecutive global steps, end to end."""
        runs = self._schedule.runs(steps)
        return np.concatenate([self._run(s, run, rank, world_size) for s, run in runs])

    def _run(self, stretch: Stretch, steps: Int64, rank: int, world_size: int) -> Int64:
        """Draw steps of one stretch: classes, each class's draw number, then its records."""
        walks = self._walks(stretch)
        share = stretch.p // world_size
        number, lap = walks.classes(steps - stretch.p_start, rank * share, (rank + 1) * share)
        draw = (lap - walks.drawn[number]).reshape(-1)
        number = number.reshape(-1)
        ids = self._classes.ids(number[:, None], walks.records.groups(number, draw))
        if not self._schedule.lowest_k:
            return ids.reshape(-1)
        ks = np.repeat(self._schedule.ks(stretch, steps), share)
        return ids[np.arange(stretch.k) < ks[:, None]]


class _Walks:
    """The walks of one stretch: the class stream, and record walks that begin with it."""

    def __init__(self, stretch: Stretch, draw: FairDraw) -> None:
        keys, self._supers, self._p = draw._keys, draw._supers, stretch.p
        sizes = self._supers.sizes
        weights = sizes // np.gcd.reduce(sizes)
        self._pattern = Pattern(weights, derive(keys["super"], stretch.p_start))
        self._groups = FairGroups(sizes, stretch.p, derive(keys["class"], stretch.p_start))
        within = draw._classes.sizes
        self.records = (
            StoredGroups(within, stretch.k)
            if draw._stored
            else FairGroups(within, stretch.k, derive(keys["record"], stretch.start))
        )
        self.drawn = self._drawn_before(stretch.start - stretch.p_start)

    def classes(self, turn: Int64, low: int, high: int) -> tuple[Int64, Int64]:
        """Return places low to high of each turn: class numbers and laps, int64[turns, places]."""
        return self._of(*self._pattern.turns(turn), low, high)

    def _of(self, group: Int64, number: Int64, low: int, high: int) -> tuple[Int64, Int64]:
        """Return the same by super-class and its own turn."""
        place = number[:, None] * self._p + np.arange(low, high)
        members = self._groups.groups(group, number, low, high)
        classes = self._supers.ids(group[:, None], members)
        return classes, place // self._supers.sizes[group][:, None]

    def _drawn_before(self, turns: int) -> Int64:
        """Return how often each class was drawn in the first `turns` of its stream."""
        sizes, given = self._supers.sizes, self._pattern.given(turns)
        if not turns:
            return np.zeros(int(sizes.sum()), np.int64)
        whole = given * self._p // sizes
        owner, place = spread(sizes)
        drawn = np.empty(len(owner), np.int64)
        drawn[self._supers.ids(owner, place)] = whole[owner]
        first = whole * sizes // self._p  # the own turn in which the unfinished lap began
        group, turn = spread(given - first)
        classes, lap = self._of(group, first[group] + turn, 0, self._p)
        drawn[classes[lap == whole[group][:, None]]] += 1
        return drawn
