"""Transforms that draw from global random states, made repeatable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from twinfeed.loaders._random_state import restored, seed_all

_ONE_AT_A_TIME = threading.Lock()


class HasRandomSeed(Protocol):
    """Draw from a generator of its own, as albumentations' `Compose` does.

    >>> import numpy as np
    >>> class Noise:
    ...     def set_random_seed(self, seed):
    ...         self.generator = np.random.default_rng(seed)
    ...     def __call__(self, sample):
    ...         return {"x": self.generator.random()}
    >>> noise = Noise()
    >>> augment = Seeded(noise, also=[noise])
    >>> augment({"seed": 7, "seed32": 7}) == augment({"seed": 7, "seed32": 7})
    True
    """

    def set_random_seed(self, seed: int, /) -> Any:
        """Begin anew from a seed of 32 bits."""


class Seeded:
    """Seed the global random states of Python, numpy and torch for each call of `transform`.

    For transforms that draw from them, as torchvision's do: `transform=Seeded(augment)`. The seed
    is the sample's, so that the result is the same in every framework and for any number of
    workers. Objects with generators of their own are named in `also`, and are given the sample's
    32-bit seed by `set_random_seed`. The states are restored after each call.

    The states are those of the whole process. So a loader makes such batches in the thread that
    asks for them, and nothing runs ahead: take worker processes (`TorchLoader(num_workers=2)`) for
    speed, or a transform that draws from `np.random.default_rng(sample["seed"])`.

    >>> import random
    >>> augment = Seeded(lambda sample: {"x": random.random()})
    >>> augment({"seed": 7, "seed32": 7}) == augment({"seed": 7, "seed32": 7})
    True
    """

    alone = True

    def __init__(
        self,
        transform: Callable[[dict[str, Any]], Mapping[str, Any]],
        /,
        *,
        also: Sequence[HasRandomSeed] = (),
    ) -> None:
        lacking = [one for one in also if not hasattr(one, "set_random_seed")]
        if lacking:
            raise TypeError(f"also must hold objects with set_random_seed, got {lacking[0]!r}")
        self.transform = transform
        self.also = tuple(also)

    def __call__(self, sample: dict[str, Any], /) -> Mapping[str, Any]:
        """Return what the transform does, drawn from the sample's seed."""
        with _ONE_AT_A_TIME, restored():
            seed_all(int(sample["seed"]))
            for one in self.also:
                one.set_random_seed(int(sample["seed32"]))
            return self.transform(sample)
