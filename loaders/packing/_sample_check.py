"""Check samples before they are packed, for every container."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from twinfeed.loaders.index.options import Label, as_label


@contextmanager
def add_record_to_errors(number: int, sample: object) -> Iterator[None]:
    """Add the number of a record, and its key, to a TypeError or ValueError in the `with` block."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        key = sample.get("__key__") if isinstance(sample, Mapping) else None
        where = f"record {number}" if key is None else f"record {number} (key {key!r})"
        raise kind(f"{where}: {error}") from error


def split_key(sample: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return the key of a sample to pack (or None) and its other fields, checked."""
    if not isinstance(sample, Mapping):
        raise TypeError(
            f"a sample must be a dict of values by field name, got {reprlib.repr(sample)}"
        )
    unnamed = [name for name in sample if not isinstance(name, str)]
    if unnamed:
        raise TypeError(f"a field's name must be a str, got {unnamed[0]!r}")
    key = sample.get("__key__")
    if key is not None:
        if not isinstance(key, str):
            raise TypeError(f"__key__ must be a str, got {key!r}")
        _check_text("__key__", key, "use another key, or rename the file")
    named = {name: value for name, value in sample.items() if name != "__key__"}
    fields = {name: _check_value(name, value) for name, value in named.items()}
    if "label" in fields:
        fields["label"] = _check_label(fields["label"])
    return key, fields


def kind_of_value(value: Any) -> str:
    """Return the kind of list that a TFRecord stores a value as: "bytes", "integers", "floats"."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    if isinstance(first, (bytes, str)):
        return "bytes"
    kind = np.asarray(value).dtype.kind
    return {"f": "floats", "i": "integers", "u": "integers", "b": "integers"}.get(kind, "bytes")


def _check_value(name: str, value: Any) -> Any:
    """Return a field's value to pack, after a check that UTF-8 can encode name and value."""
    _check_text("a field's name", name, "rename the field")
    if np.ma.is_masked(value):
        raise TypeError(f"field {name!r} is masked: fill it, as in values.filled(-1)")
    if isinstance(value, str):
        _check_text(f"field {name!r}", value, "pack bytes instead of text")
    return bytes(value) if isinstance(value, (bytearray, memoryview)) else value


def _check_text(subject: str, text: str, advice: str) -> None:
    """Raise ValueError for a string that UTF-8 cannot encode, such as the names of some files."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            got = reprlib.repr(text)
            raise ValueError(f"{subject} must fit UTF-8, got {got}: {advice}") from None


def _check_label(value: Any) -> Label:
    """Return a label as an int or a str; refuse others, and white space that would be lost."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if isinstance(value, str):
        _check_text("label", value, "use another name")
        stripped = value.strip()
        if stripped and value != stripped:
            raise ValueError(
                f"label {value!r} begins or ends with white space, which is lost: use {stripped!r}"
            )
        value = stripped  # a blank name is refused below
    elif getattr(value, "ndim", None) == 0:  # a number of numpy or a tensor
        value = np.asarray(value)[()]
    if (label := as_label(value)) is not None:
        return label
    raise TypeError(
        f"label must be a name or an integer that fits int64, got {reprlib.repr(value)}: "
        "if it is not a class, give the field another name, in an index by fields= or --field"
    )
