"""Webdataset's convention: the extension of a member is its type."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import numpy as np

from twinfeed.loaders.errors import UnsafeContentError
from twinfeed.loaders.feed.decode import DecodeImage, Fit, ImageMode
from twinfeed.loaders.formats.files import IMAGES
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.samplers import validate

PICKLES = ("pyd", "pickle", "pkl")
TORCHES = ("pt", "pth")
PLAIN: Mapping[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), int),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("json", "jsn"), json.loads),
}


class DecodeExtensions:
    """Decode each field by the extension that is its name, as webdataset's users expect.

    The last part of the name counts (`seg.png`).

    - images (jpg, jpeg, png, webp, …): uint8[height, width, 3], or what `DecodeImage` makes with
      `mode`, `size`, `fit` and `max_pixels`. The bytes say the kind of the image.
    - cls, index, count, id, …: an int
    - txt, text, transcript: a str
    - json, jsn: what the JSON holds, for a transform to make arrays of
    - npy: an array; npz: each of its arrays, as `<field>.<name>`
    - anything else: the bytes as they are

    Args:
        kinds: the extension of a field with another name (`{"image": "jpg"}`).
        mode: as for `DecodeImage`.
        size: as for `DecodeImage`.
        fit: as for `DecodeImage`.
        max_pixels: as for `DecodeImage`.
        allow_pickle: whether pickles are loaded (pyd, pickle, pkl, or Python objects in npy and
            npz), which runs the code in the pickle.

    Raises:
        UnsafeContentError: a pickle without `allow_pickle=True`, and files of torch (pt, pth). Read
            those in your own `decode`, by `torch.load(weights_only=True)`.

    >>> DecodeExtensions()({"cls": b"7", "txt": b"a cat", "json": b'{"x": [1]}', "mp4": b"..."})
    {'cls': 7, 'txt': 'a cat', 'json': {'x': [1]}, 'mp4': b'...'}
    >>> DecodeExtensions()({"pyd": b"..."})
    Traceback (most recent call last):
    twinfeed.loaders.errors.UnsafeContentError: field 'pyd' is a pickle: loading it executes code
      what to do: pass allow_pickle=True if you trust the data
    """

    def __init__(
        self,
        *,
        kinds: Mapping[str, str] | None = None,
        mode: ImageMode = "RGB",
        size: tuple[int, int] | None = None,
        fit: Fit = "stretch",
        max_pixels: int = LIMITS.pixels,
        allow_pickle: bool = False,
    ) -> None:
        self.kinds = dict(kinds or {})
        self.allow_pickle = validate.flag("allow_pickle", allow_pickle)
        self._image = partial(DecodeImage, mode=mode, size=size, fit=fit, max_pixels=max_pixels)
        with suppress(ModuleNotFoundError):  # records without images need no decoder of images
            self._image()

    def __call__(self, sample: Mapping[str, Any], /) -> dict[str, Any]:
        """Return the sample with every field decoded whose extension is known."""
        decoded: dict[str, Any] = {}
        for field, value in sample.items():
            extension = self.kinds.get(field, field).rpartition(".")[2].lower()
            if not isinstance(value, bytes):
                decoded[field] = value
            elif extension == "npz":
                arrays = self._load(field, value)
                decoded |= {f"{field}.{name}": array for name, array in arrays.items()}
            else:
                decoded[field] = self._decode(field, extension, value)
        return decoded

    @cached_property
    def _decode_image(self) -> DecodeImage:
        return self._image()

    def _decode(self, field: str, extension: str, data: bytes) -> Any:
        if extension in IMAGES:
            return self._decode_image._decode(data, field)
        if extension in PLAIN:
            return PLAIN[extension](data)
        if extension == "npy":
            return self._load(field, data)
        if extension in PICKLES and not self.allow_pickle:
            raise _unsafe(field)
        if extension in PICKLES:
            return pickle.loads(data)
        if extension in TORCHES:
            raise UnsafeContentError(
                f"field {field!r} is a file of torch's own: loading it may execute code",
                advice="load it in your own decode with torch.load(..., weights_only=True)",
            )
        return data

    def _load(self, field: str, data: bytes) -> Any:
        """Return the array of a .npy file, or a dict of the arrays of a .npz file."""
        try:
            loaded = np.load(io.BytesIO(data), allow_pickle=self.allow_pickle)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                return loaded
            with loaded:
                return {name: loaded[name] for name in loaded.files}
        except ValueError as error:
            if "allow_pickle" in str(error):
                raise _unsafe(field) from error
            raise


def _unsafe(field: str) -> UnsafeContentError:
    return UnsafeContentError(
        f"field {field!r} is a pickle: loading it executes code",
        advice="pass allow_pickle=True if you trust the data",
    )
