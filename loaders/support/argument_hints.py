"""TypeErrors that say what an option of another library, or a misspelt option, is called here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_BATCHES = "the feed's sampler has it, as in Feed(index, BatchSampler(order, batch_size=…"
_SEED = "the sampler of the feed has the seed: seed="
_SAMPLER = "the feed has it: Feed(index, sampler)"
_LOADER = "the loader has it, as in TorchLoader(feed, {}=…)"
_MEMORY = "it follows from memory=, the bytes of the open blocks; ShardShuffleSampler takes it"
_SAMPLER_HINTS = {
    "batch_size": f"{_BATCHES}))",
    "collate_fn": "the feed has it: collate= says how fields become a batch, batch_transform= "
    "changes the batch",
    "drop_last": f"{_BATCHES}, last_batch='drop'))",
    "drop_remainder": f"{_BATCHES}, last_batch='drop'))",
    "generator": _SEED,
    "shuffle": "the feed's sampler shuffles, as in BatchSampler(RandomSampler(n, seed=0), "
    "batch_size=…)",
}

FEED_HINTS = {
    **_SAMPLER_HINTS,
    **{name: _LOADER.format(name) for name in ("device", "num_workers", "prefetch", "threads")},
}
"""Hints for options that a `Feed` does not take."""

LOADER_HINTS = {
    **_SAMPLER_HINTS,
    "batch_sampler": _SAMPLER,
    "buffer_size": "prefetch= is the number of batches ahead; a sampler shuffles without a buffer",
    "num_parallel_calls": "threads= is the number of threads that make batches",
    "sampler": _SAMPLER,
    "seed": _SEED,
    "transform": "the feed has it: Feed(…, transform=…)",
}
"""Hints for options of torch's DataLoader and of tf.data that no loader takes."""

PROCESS_HINTS = {
    "num_workers": "threads= is the number of threads that make batches; TorchLoader has processes",
    "pin_memory": "leave it out, or name the device= that batches go to",
}
"""Hints for options of torch's DataLoader that only a `TorchLoader` can have."""

PINNED_HINTS = {
    "pin_memory": "leave it out: where device= is a GPU, batches come through pinned memory",
    "pin_memory_device": "leave it out: device= names the GPU that batches go to",
}
"""Hints for options of torch's DataLoader that a `TorchLoader` does not need."""

SHUFFLED_HINTS = {
    "batch_size": "BatchSampler has it, as in BatchSampler(shuffled(index, seed=0), batch_size=…)",
    "block": _MEMORY,
    "buffer_size": "memory= is the number of bytes of the open blocks, 512 MiB by default",
    "window": _MEMORY,
}
"""Hints for options of other shuffles that `shuffled` computes."""

DECODE_IMAGE_HINTS = {
    "channels_first": "images are [height, width, channel]: batch['image'].permute(0, 3, 1, 2)",
}
"""Hints for options of other image decoders whose effect is a change of the batch here."""


def hint_arguments(**hints: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that makes a function's TypeErrors for wrong arguments give advice.

    `hints` has the advice by name for options of other libraries. For any other unknown option, the
    error suggests the option with the most similar name. Where a positional argument is missing, or
    has a name, the error shows the call.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        is_constructor = function.__name__ == "__init__"  # whose first parameter is `self`
        parameters = [*inspect.signature(function).parameters.values()][is_constructor:]
        positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        unnamed = [p.name for p in positional if p.kind is p.POSITIONAL_ONLY]
        names = [p.name for p in parameters if p.name not in unnamed]
        num_required = sum(p.default is p.empty for p in positional if p.name in unnamed)
        arguments = ", ".join(p.name for p in positional)

        @wraps(function)
        def check_and_call(*args: P.args, **kwargs: P.kwargs) -> T:
            what = type(args[0]).__name__ if is_constructor else function.__name__
            num_positional = len(args) - is_constructor
            for name in kwargs:
                if name not in [*names, *unnamed]:
                    hint = hints.get(name) or closest_name(name, names)
                    raise TypeError(f"{what} takes no {name}=: {hint}")
            if num_positional < num_required or not kwargs.keys().isdisjoint(unnamed):
                raise TypeError(f"{what} needs {arguments} by position: write {what}({arguments})")
            if num_positional > len(positional):
                raise TypeError(
                    f"{what} takes its options by name, as in {names[-1]}=…, "
                    f"got {args[len(positional) + is_constructor]!r}"
                )
            return function(*args, **kwargs)

        return check_and_call

    return decorate


def closest_name(name: str, names: Iterable[str], /) -> str:
    """Return advice, as text, for an unknown option: the most similar of the names, or all names.

    >>> closest_name("batchsize", ["batch_size", "seed"]), closest_name("x", ["batch_size", "seed"])
    ('did you mean batch_size=?', 'its options are batch_size, seed')
    """
    names = list(names)
    closest = get_close_matches(name, names, 1)
    return f"did you mean {closest[0]}=?" if closest else f"its options are {', '.join(names)}"
