"""Seed the global random states of Python, numpy and torch, and restore them."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from twinfeed.loaders.support.display import short_repr

LOW_32_BITS = (1 << 32) - 1

_LOCK = threading.Lock()  # one call at a time: the states are those of the process


class HasRandomSeed(Protocol):
    """An object with a random generator of its own, such as albumentations' `Compose`.

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
        """Seed the generator with 32 bits."""


class Seeded:
    """Seed the global random states of Python, numpy and torch for each call of `transform`.

    For transforms that draw from these states, as torchvision's do: `transform=Seeded(augment)`.
    The seed is the sample's, so that the result is the same in every framework and for any number
    of workers. The states are restored after each call.

    The states are those of the whole process. So a loader makes the batches in the loop's own
    thread, and no batch ahead. For speed, take worker processes (`TorchLoader(num_workers=2)`), or
    a transform that draws from `np.random.default_rng(sample["seed"])`.

    Args:
        transform: a function of one sample, as for `Feed`.
        also: objects with generators of their own, which are given the sample's 32-bit seed by
            `set_random_seed`.

    >>> import random
    >>> augment = Seeded(lambda sample: {"x": random.random()})
    >>> augment({"seed": 7, "seed32": 7}) == augment({"seed": 7, "seed32": 7})
    True
    """

    sets_global_state = True

    def __init__(
        self,
        transform: Callable[[dict[str, Any]], Mapping[str, Any]],
        /,
        *,
        also: Sequence[HasRandomSeed] = (),
    ) -> None:
        for generator in also:
            if not hasattr(generator, "set_random_seed"):
                raise TypeError(f"also must hold objects with set_random_seed, got {generator!r}")
        self.transform = transform
        self.also = tuple(also)

    def __repr__(self) -> str:
        return f"Seeded({short_repr(self.transform)})"

    def __call__(self, sample: dict[str, Any], /) -> Mapping[str, Any]:
        """Return `transform(sample)`, with the global random states seeded by the sample's seed."""
        with _LOCK, restore_random_states():
            seed_all(int(sample["seed"]))
            for generator in self.also:
                generator.set_random_seed(int(sample["seed32"]))
            return self.transform(sample)


@contextmanager
def restore_random_states() -> Iterator[None]:
    """Restore the global random states of Python, numpy and torch after the `with` block."""
    torch = sys.modules.get("torch")
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = None if torch is None else torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if torch is not None:
            torch.default_generator.set_state(torch_state)


def seed_all(seed: int, /) -> None:
    """Seed the global random states of Python, numpy and torch with a seed of 64 bits."""
    random.seed(seed)
    np.random.seed(seed & LOW_32_BITS)
    torch = sys.modules.get("torch")
    if torch is not None:
        # torch.manual_seed would seed every device, which takes a hundred microseconds.
        torch.default_generator.manual_seed(seed)
