"""The arguments of an audit, checked once: what is known and promised of a sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, SupportsIndex, get_args

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import validate
from twinfeed.samplers.label_arrays import as_labels
from twinfeed.samplers.types import Int64s

Expectation = Literal["training", "evaluation", "pk", "with replacement", "infinite"]

_UNKNOWN_MOST = 1_000_000  # ids of a pass that are drawn, if the number of records is not known


@dataclass(frozen=True)
class Promises:
    """The arguments of `audit`. `labels` are class numbers from 0, `worlds` numbers of ranks."""

    num_records: int | None
    labels: Int64s | None
    worlds: tuple[int, ...]
    epochs: int
    batch_size: int | None
    expect: Expectation | None
    ids: Callable[[Any], Any] | None
    processes: bool
    max_seconds: float

    @classmethod
    def checked(
        cls,
        num_records: SupportsIndex | None,
        labels: ArrayLike | None,
        world_size: SupportsIndex | Sequence[SupportsIndex],
        epochs: SupportsIndex,
        batch_size: SupportsIndex | None,
        expect: Expectation | None,
        ids: Callable[[Any], Any] | None,
        processes: bool,
        max_seconds: float,
    ) -> Self:
        """Return the arguments, if each is right and they agree."""
        if not max_seconds > 0:
            raise ValueError(f"max_seconds must be above 0, got {max_seconds!r}")
        if ids is not None and not callable(ids):
            raise TypeError(f"ids must be a function of an item, got {ids!r}")
        if expect == "pk" and labels is None:
            raise ValueError("expect='pk' needs the label of each record: pass labels=")
        classes, n = None, None
        if num_records is not None:
            n = validate.integer("num_records", num_records, minimum=0)
        if labels is not None:
            classes = np.unique(as_labels(labels), return_inverse=True)[1]
            if n not in (None, len(classes)):
                raise ValueError(f"labels must be given for {n} records, got {len(classes)}")
            n = len(classes)
        worlds = world_size if isinstance(world_size, Sequence) else [world_size]
        sizes = {validate.integer("world_size", size, minimum=1) for size in worlds}
        if not sizes:
            raise ValueError("world_size must have a number of ranks, got none")
        if batch_size is not None:
            batch_size = validate.integer("batch_size", batch_size, minimum=1)
        return cls(
            n,
            classes,
            tuple(sorted(sizes)),
            validate.integer("epochs", epochs, minimum=1),
            batch_size,
            validate.choice("expect", expect, (None, *get_args(Expectation))),
            ids,
            validate.flag("processes", processes),
            max_seconds,
        )

    @property
    def most(self) -> int:
        """The number of ids after which a pass of one rank is endless."""
        n = self.num_records
        return _UNKNOWN_MOST if n is None else (self.epochs + 1) * n + 1000
