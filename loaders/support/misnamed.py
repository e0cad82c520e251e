"""Options that other libraries have, or that are misspelt: an error that names what is meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def counterparts(**known: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have a constructor or a function raise TypeError for options that it does not have.

    `known` has the advice for options that it has under another name, or elsewhere, and for options
    of its own that are easily forgotten. An option that is given by its place is refused with its
    name, an unknown option with the name that is most alike.
    """

    def checked(init: Callable[P, T]) -> Callable[P, T]:
        parameters = inspect.signature(init).parameters.values()
        named = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
        needed = [one.name for one in parameters if one.name in named and one.default is one.empty]
        most = len(parameters) - len(named)

        @wraps(init)
        def called(*args: P.args, **options: P.kwargs) -> T:
            what = type(args[0]).__name__ if init.__name__ == "__init__" else init.__name__
            for name in options:
                if name not in named:
                    raise TypeError(
                        f"{what} takes no {name}=: {known.get(name) or alike(name, named)}"
                    )
            if len(args) > most:
                raise TypeError(
                    f"{what} takes its options by name, as in {named[0]}=…, got {args[most]!r}"
                )
            for name in needed:
                if name in known and name not in options:
                    raise TypeError(f"{what} needs {name}=: {known[name]}")
            return init(*args, **options)

        return called

    return checked


def alike(name: str, names: Iterable[str], /) -> str:
    """Say which of the names is meant, or which there are.

    >>> alike("batchsize", ["batch_size", "last_batch"]), alike("x", ["batch_size", "last_batch"])
    ('did you mean batch_size=?', 'its options are batch_size, last_batch')
    """
    names = list(names)
    found = get_close_matches(name, names, 1)
    return f"did you mean {found[0]}=?" if found else f"its options are {', '.join(names)}"
