"""The arguments of an audit, checked: what is known and promised of a sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from twinfeed.samplers import validate
from twinfeed.samplers.label_arrays import as_labels

Expectation = Literal["training", "evaluation", "pk", "with replacement", "infinite"]

_UNKNOWN_MOST = 1_000_000  # ids of a pass that are drawn, if the number of records is not known


@dataclass
class Declared:
    """The arguments of `audit`. `labels` become class numbers from 0, `world_sizes` a sorted list.

    >>> Declared(None, ["b", "a", "b"], (2, 1), 3, None, None, None, False, 60.0).num_records
    3
    """

    num_records: Any
    labels: Any
    world_sizes: Any
    epochs: Any
    batch_size: Any
    expect: Expectation | None
    ids: Callable[[Any], Any] | None
    processes: bool
    max_seconds: float

    def __post_init__(self) -> None:
        if not self.max_seconds > 0:
            raise ValueError(f"max_seconds must be above 0, got {self.max_seconds!r}")
        self.max_seconds = min(self.max_seconds, 1e8)  # timers count no further
        if self.ids is not None and not callable(self.ids):
            raise TypeError(f"ids must be a function of an item, got {self.ids!r}")
        validate.choice("expect", self.expect, (None, *get_args(Expectation)))
        validate.flag("processes", self.processes)
        if self.expect == "pk" and self.labels is None:
            raise ValueError("expect='pk' needs the label of each record: pass labels=")
        if self.num_records is not None:
            self.num_records = validate.integer("num_records", self.num_records, minimum=0)
        if self.labels is not None:
            self.labels = np.unique(as_labels(self.labels), return_inverse=True)[1]
            n, count = self.num_records, len(self.labels)
            if n not in (None, count):
                raise ValueError(f"labels must be given for {n} records, got {count}")
            self.num_records = count
        sizes = self.world_sizes if isinstance(self.world_sizes, Sequence) else [self.world_sizes]
        self.world_sizes = sorted({validate.integer("world_size", n, minimum=1) for n in sizes})
        if not self.world_sizes:
            raise ValueError("world_size must have a number of ranks, got none")
        self.epochs = validate.integer("epochs", self.epochs, minimum=1)
        if self.batch_size is not None:
            self.batch_size = validate.integer("batch_size", self.batch_size, minimum=1)

    @property
    def most(self) -> int:
        """The number of ids after which a pass of one rank is endless."""
        n = self.num_records
        return _UNKNOWN_MOST if n is None else int((self.epochs + 1) * n + 1000)
