"""Show the columns and fields of a record as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np

from twinfeed.loaders.index import Index
from twinfeed.loaders.reading.reader import Reader
from twinfeed.samplers.validate import counted

_MAX_TEXT = 200
_MAX_HEX = 24


def preview(index: Index, reader: Reader, record: int) -> Iterator[str]:
    """Yield a line of text for each column and each field of a record: its name and value."""
    for name, column in index.columns.items():
        value = column[record]
        if name == "label" and index.classes:
            value = f"{value} ({index.classes[int(value)]})"
        yield f"{name}: {value}"
    for name in index.fields:
        if is_missing(index, name, record):
            yield f"{name}: missing" + ", read as empty" * (index.options.missing == "empty")
        else:
            row = index.table(name)[record]
            location = "" if index.container == "files" else f" at byte {row['offset']}"
            (value,) = reader.read([record], [name])[name]
            yield f"{name}: {_describe(value, location)}"


def is_missing(index: Index, name: str, record: int, /) -> bool:
    """Return whether a field is missing in a record."""
    return name in index.fields and bool(index.table(name)["length"][record] < 0)


def _describe(value: Any, location: str) -> str:
    """Describe the value of a field in one line; `location` says where its bytes lie."""
    if isinstance(value, bytes):
        return f"{counted(len(value), 'byte')}{location}, {_describe_bytes(value)}"
    if isinstance(value, list):
        return f"{len(value)} values: " + "; ".join(_describe_bytes(item) for item in value[:5])
    array = np.asarray(value)
    shown = np.array2string(array, threshold=10, max_line_width=120)
    return f"{array.dtype}[{len(array)}]: {shown}"


def _describe_bytes(data: bytes) -> str:
    """Describe bytes in one line: an image's format and size, text, or the first bytes in hex."""
    if image_text := describe_image(data):
        return image_text
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return f"begins with {data[:_MAX_HEX].hex(' ')}"
    shown = text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."
    return f"text: {shown}"


def describe_image(data: bytes, /) -> str | None:
    """Return an image's format, size and mode; None if Pillow is missing, or cannot read it."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        return None
    try:
        with Image.open(BytesIO(data)) as image:
            return f"{image.format} image, {image.width} x {image.height}, {image.mode}"
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError):
        return None
