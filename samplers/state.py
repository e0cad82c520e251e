"""Saved states: fingerprints of streams, and the error if a state is of another stream."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from twinfeed.samplers.drawing.prefix_sums import Counts
from twinfeed.samplers.mapped import slices

STATE_VERSION = 1
# The characters of JSON up to which a parameter is saved as it is. A state has a few such
# parameters at most, so it stays below 4 KB.
_MAX_TEXT = 1000


class StateMismatchError(ValueError):
    """Error for a state of other data, other parameters or a newer version.

    >>> from twinfeed.samplers import ExactOnceBatchSampler, StateMismatchError
    >>> state = ExactOnceBatchSampler(10, batch_size=4).state_dict()
    >>> try:
    ...     ExactOnceBatchSampler(11, batch_size=4).load_state_dict(state)
    ... except StateMismatchError as error:
    ...     print(error)
    the state is of another stream:
      order.n: the state has 10, this sampler has 11
      what to do: give the data, labels and sampler that the state was saved with, or begin anew...
    """


def compare_fingerprints(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise StateMismatchError if two fingerprints differ, with a line for each differing field."""
    default = "nothing"  # what the error says for a field that only one of them has
    saved, current = dict(flattened(saved)), dict(flattened(current))
    differences = [
        f"  {field}: the state has {saved.get(field, default)!r}, "
        f"this sampler has {current.get(field, default)!r}"
        for field in current | saved
        if saved.get(field, default) != current.get(field, default)
    ]
    if differences:
        advice = (
            "  what to do: give the data, labels and sampler that the state was saved with, "
            "or begin anew without the state"
        )
        if any(re.search(r"\bexclude\b|changes so far", field) for field in saved):
            advice += "; where it had exclude=, with replaced(sampler, {step: {bad: good}})"
        lines = ["the state is of another stream:", *differences, advice]
        raise StateMismatchError("\n".join(lines))


def fields_before(fingerprint: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return the fields of a fingerprint on which the batches before this training step depend.
    Many changes are replaced by one hash, so that a state stays small.

    >>> fields_before({"k": 2, "k from step 7": 3, "k from step 9": 4}, step=9)
    {'k': 2, 'k from step 7': 3}
    """
    # Fields that hold from step 0 on are always returned, at step 0 too.
    fields = {f: v for f, v in flattened(fingerprint) if first_step(f) < max(step, 1)}
    changes = {field: value for field, value in fields.items() if first_step(field)}
    text = json.dumps(changes, sort_keys=True, default=str)
    if len(text) < _MAX_TEXT:
        return fields
    unchanged = {field: value for field, value in fields.items() if field not in changes}
    return {**unchanged, "changes so far": f"{len(changes)} changes {_text_hash(text)}"}


def first_step(field: str) -> int:
    """Return the training step in the name of a field of a fingerprint, or 0 if there is none.

    >>> first_step("order.weights from step 12000"), first_step("order.weights")
    (12000, 0)
    """
    # A dot may follow, and the name of a field within this field.
    match = re.search(r" from step (\d{1,19})(?:\.|$)", field)
    return int(match[1]) if match else 0


def flattened(nested: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of every field of nested mappings, and of lists of them, as
    `orders.0.seed`.
    """
    for name, value in nested.items():
        if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping):
            yield from flattened(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def json_value(parameter: Any, *, hashed: bool = True) -> Any:
    """Return a parameter of a sampler as a short JSON value: arrays and long values become hashes.
    With `hashed=False` arrays become "": this only checks the types.

    Raises: TypeError: JSON has no value for the parameter.
    """
    if isinstance(parameter, np.ndarray) and parameter.dtype.kind in "biufU":
        return digest(parameter) if hashed else ""
    if isinstance(parameter, Mapping):
        return {str(name): json_value(value, hashed=hashed) for name, value in parameter.items()}
    if hasattr(type(parameter), "fingerprint"):  # a sampler, or large weights
        return parameter.fingerprint if hashed else ""
    if isinstance(parameter, (list, tuple)):
        parameter = [json_value(item, hashed=hashed) for item in parameter]
    elif isinstance(parameter, np.generic):
        parameter = parameter.item()
    if not isinstance(parameter, (list, str, int, float, type(None))):
        raise TypeError(
            f"parameters must hold numbers, strings, None, arrays of them, samplers, and lists and "
            f"dicts of these, got {parameter!r}"
        )
    text = json.dumps(parameter, sort_keys=True)
    if not isinstance(parameter, (list, str)) or len(text) < _MAX_TEXT:
        return parameter
    unit = "values" if isinstance(parameter, list) else "characters"
    return f"{len(parameter)} {unit} {_text_hash(text)}"


def _text_hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def digest(values: Counts) -> str:
    """Return a hash of an array's values, the same for any integer type, byte order and machine: of
    int64, of the bytes of float64, or of the lengths and characters of strings.
    """
    content = hashlib.blake2b(digest_size=16)
    text = b""
    numbers: Counts = values
    if isinstance(values, np.ndarray) and values.dtype.kind == "U":
        numbers = np.char.str_len(values)
        text = "".join(values.tolist()).encode("utf-8", "surrogatepass")
    elif isinstance(values, np.ndarray) and values.dtype.kind == "f":
        numbers = values.astype("<f8").view("<i8")
    for chunk in slices(len(numbers)):  # to bound memory: the array may be a large file
        content.update(np.ascontiguousarray(numbers[chunk], dtype="<i8").data)
    content.update(text)
    return f"{len(numbers)} values {content.hexdigest()}"
