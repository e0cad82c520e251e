"""States: which stream a place belongs to, and the refusal of any other stream."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers import _validate

STATE_VERSION = 1


class StateMismatchError(ValueError):
    """Say that a state belongs to other data, other parameters or a newer version.

    >>> from twinfeed.samplers import ExactOnceBatchSampler, StateMismatchError
    >>> state = ExactOnceBatchSampler(10, batch_size=4).state_dict()
    >>> try:
    ...     ExactOnceBatchSampler(11, batch_size=4).load_state_dict(state)
    ... except StateMismatchError as error:
    ...     print(error)
    the state is of another stream:
      order.n: the state has 10, this sampler has 11
    """


def position(
    state: Mapping[str, Any], fingerprint: Mapping[str, Any], *, steps: int, epochs: int
) -> tuple[int, int]:
    """Return the (epoch, step) of a state of the stream with this fingerprint."""
    if not isinstance(state, Mapping):
        raise StateMismatchError(f"the state must be a dict that state_dict gave, got {state!r}")
    missing = {"version", "epoch", "step", "fingerprint"} - set(state)
    if missing:
        raise StateMismatchError(f"the state lacks {', '.join(sorted(missing))}: {state!r}")
    if state["version"] != STATE_VERSION:
        raise StateMismatchError(
            f"the state has version {state['version']!r}, this library reads {STATE_VERSION}"
        )
    _compare(state["fingerprint"], fingerprint)
    epoch = _validate.integer("epoch of the state", state["epoch"], minimum=0, below=epochs)
    step = _validate.integer("step of the state", state["step"], minimum=0)
    if step >= max(1, steps):
        raise StateMismatchError(f"the state is at step {step}, an epoch has {steps}")
    return epoch, step


def _compare(theirs: Any, ours: Mapping[str, Any]) -> None:
    """Raise with one line for each field that differs."""
    if not isinstance(theirs, Mapping):
        raise StateMismatchError(f"fingerprint of the state must be a mapping, got {theirs!r}")
    absent = "nothing"
    theirs, ours = dict(_fields(theirs)), dict(_fields(ours))
    lines = [
        f"  {field}: the state has {theirs.get(field, absent)!r}, "
        f"this sampler has {ours.get(field, absent)!r}"
        for field in (*ours, *(f for f in theirs if f not in ours))
        if theirs.get(field, absent) != ours.get(field, absent)
    ]
    if lines:
        raise StateMismatchError("\n".join(["the state is of another stream:", *lines]))


def _fields(nested: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every field with its path: `inner.n`, `orders.0.seed`."""
    for name, value in nested.items():
        if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
            value = {str(place): item for place, item in enumerate(value)}
        if isinstance(value, Mapping):
            yield from _fields(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def told(parameter: Any) -> Any:
    """Return a parameter as JSON can hold it: an array as its digest, orders as fingerprints."""
    if isinstance(parameter, np.ndarray):
        return digest(parameter)
    if isinstance(parameter, Mapping):
        return {name: told(each) for name, each in parameter.items()}
    if isinstance(parameter, list):
        return [told(each) for each in parameter]
    return getattr(parameter, "fingerprint", parameter)


def digest(array: NDArray[Any]) -> str:
    """Return a hash of an array's values, whatever its byte order or the machine."""
    text = b""
    numbers: NDArray[Any] = array
    if array.dtype.kind == "U":
        numbers = np.char.str_len(array).astype(np.int64)
        text = "".join(array.tolist()).encode("utf-8", "surrogatepass")
    little = numbers.astype(numbers.dtype.newbyteorder("<"), copy=False)
    content = hashlib.blake2b(np.ascontiguousarray(little).data, digest_size=16)
    content.update(text)
    return f"{len(array)} values {content.hexdigest()}"
