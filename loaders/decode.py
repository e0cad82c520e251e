"""Ready-made `decode` functions: images, raw arrays, Examples. extensions.py has webdataset's."""

from __future__ import annotations

import io
import math
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from twinfeed.loaders import _checks, _system
from twinfeed.loaders._checks import Array
from twinfeed.loaders.formats.example import parse
from twinfeed.loaders.limits import LIMITS

ImageMode = Literal["RGB", "L"]

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM", "TIFF", "GIF")
"""The formats that Pillow may open: none that runs a program, as EPS does, and no rare ones."""

# Memory of at least _LARGE bytes that an image has left is kept for the next images. Memory of more
# than _KEPT bytes is not kept: that of a single huge image would stay for the rest of the run.
_LARGE, _KEPT = 1 << 20, 1 << 26
_LEFT: deque[Array] = deque(maxlen=8)


class DecodeImage:
    """Decode a JPEG, PNG or other image of a record to uint8[height, width, 3].

    - `mode`: "RGB", or "L" for uint8[height, width].
    - `size`: (height, width) to which Pillow's bilinear filter resizes, in pixels.
    - `max_pixels`: a larger image is refused by its header, before memory is taken. Pillow has a
      limit of its own, `PIL.Image.MAX_IMAGE_PIXELS`.

    simplejpeg decodes JPEG, Pillow any other of `FORMATS`. Needs the extra `images`. An orientation
    in EXIF is not applied, and transparency is dropped.

    Raises ValueError for another mode, for an image that is too large or has pixels of 32 bits, and
    Pillow's and simplejpeg's own errors for bytes that are no image. The loaders turn an error of a
    record into DecodeError, which names the record.

    >>> from PIL import Image
    >>> file = io.BytesIO()
    >>> Image.new("L", (3, 2), 255).save(file, "png")
    >>> DecodeImage(mode="L")({"image": file.getvalue()})["image"]
    array([[255, 255, 255],
           [255, 255, 255]], dtype=uint8)
    """

    def __init__(
        self,
        field: str = "image",
        *,
        mode: ImageMode = "RGB",
        size: tuple[int, int] | None = None,
        max_pixels: int = LIMITS.pixels,
    ) -> None:
        if not isinstance(field, str):
            raise TypeError(f"field must be the name of a field, got {field!r}; size= resizes")
        self.field = field
        self.mode = _checks.choice("mode", mode, get_args(ImageMode))
        self._colours = "GRAY" if mode == "L" else "RGB"  # simplejpeg's name
        self.max_pixels = _checks.count("max_pixels", max_pixels)
        if size is not None and (not isinstance(size, tuple) or len(size) != 2):
            raise ValueError(f"size must be (height, width), got {size!r}")
        self.size = size and (_checks.count("height", size[0]), _checks.count("width", size[1]))

    def __call__(self, sample: Mapping[str, Any], /) -> dict[str, Any]:
        """Return the sample with its field decoded."""
        return {**sample, self.field: self._decode(sample[self.field])}

    @property
    def writes(self) -> tuple[str, ...]:
        """The fields that `into` can write."""
        return (self.field,)

    def into(self, sample: Mapping[str, Any], slots: Mapping[str, Array], /) -> dict[str, Any]:
        """Return the sample decoded, into the field's slot of a batch where the image fits."""
        data, slot = sample[self.field], slots[self.field]
        if _is_jpeg(data) and self._fills(data, slot):
            return {**sample, self.field: slot}
        array = self._decode(data)
        if (array.shape, array.dtype) != (slot.shape, slot.dtype):
            return {**sample, self.field: array}
        slot[...] = array
        return {**sample, self.field: slot}

    def _fills(self, data: bytes, slot: Array) -> bool:
        """Decode a JPEG into the slot where it needs no resizing and fits; say whether it does."""
        import simplejpeg

        if slot.dtype != np.uint8 or slot.ndim < 2 or math.prod(slot.shape[:2]) > self.max_pixels:
            return False
        try:
            if self.size is not None and simplejpeg.decode_jpeg_header(data)[:2] != self.size:
                return False
            array = simplejpeg.decode_jpeg(data, colorspace=self._colours, buffer=slot)
        except ValueError:  # too large, or broken: `_decode` says which
            return False
        return bool(slot.shape == array.shape[: 2 if self.mode == "L" else 3])

    def _decode(self, data: bytes) -> Array:
        from PIL import Image

        if _is_jpeg(data):
            array = self._jpeg(data)
            if self.size is None or array.shape[:2] == self.size:
                return array
            image = Image.fromarray(array)
        else:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            self._check(image.height, image.width)
            if image.mode in ("I", "F"):
                raise ValueError(
                    f"the image has pixels of 32 bits (Pillow's mode {image.mode!r}), which uint8 "
                    f"cannot hold: decode it by a function of your own"
                )
            image = image.convert(self.mode)
        huge = 4 * image.height * image.width > _KEPT  # Pillow takes four bytes a pixel
        if self.size is not None and image.size != self.size[::-1]:
            image = image.resize(self.size[::-1], Image.Resampling.BILINEAR)
        array = np.asarray(image)
        if huge:
            del image
            _system.give_back_memory()
        return array

    def _jpeg(self, data: bytes) -> Array:
        """Decode a JPEG, a large one into memory that another image has left."""
        import simplejpeg

        height, width = simplejpeg.decode_jpeg_header(data)[:2]
        self._check(height, width)
        nbytes = height * width * (1 if self.mode == "L" else 3)
        buffer = _memory(nbytes) if nbytes >= _LARGE else None
        array = simplejpeg.decode_jpeg(data, colorspace=self._colours, buffer=buffer)
        return array[..., 0] if self.mode == "L" else array  # type: ignore[no-any-return]

    def _check(self, height: int, width: int) -> None:
        """Refuse an image for the size that its header tells."""
        if height * width > self.max_pixels:
            raise ValueError(
                f"the image has {height} x {width} pixels, more than {self.max_pixels}: decode it "
                f"with DecodeImage(max_pixels=…) if images are meant to be so large"
            )


def _is_jpeg(data: bytes) -> bool:
    return data[:2] == b"\xff\xd8"


def _memory(nbytes: int) -> Array:
    """Return memory for an image. It is kept for the next image once no array uses it.

    Memory that is mapped anew for each image costs up to as much as decoding does.
    """
    held = np.empty(0, np.uint8)
    with suppress(IndexError):
        held = _LEFT.pop()
    if not nbytes <= len(held) <= 2 * nbytes:
        held = np.empty(nbytes, np.uint8)
    owner = _Owner(held[:nbytes])
    if len(held) <= _KEPT:
        weakref.finalize(owner, _LEFT.append, held).atexit = False
    return np.asarray(owner)


class _Owner:
    """Stay alive as long as an array over some memory does."""

    def __init__(self, memory: Array) -> None:
        self.memory = memory
        self.__array_interface__ = memory.__array_interface__


class DecodeArray:
    """Decode a field of raw numbers to an array of `dtype` and `shape`; one axis may be -1.

    The array is read-only, a view of the bytes that were read.

    Raises ValueError for a dtype of Python objects, and for bytes that do not fill the shape. The
    loaders turn the latter into DecodeError, which names the record.

    >>> DecodeArray("pixels", dtype="<i2", shape=(-1, 2))({"pixels": bytes(range(8))})["pixels"]
    array([[ 256,  770],
           [1284, 1798]], dtype=int16)
    """

    def __init__(
        self, field: str, *, dtype: npt.DTypeLike, shape: int | tuple[int, ...] = (-1,)
    ) -> None:
        self.field = field
        self.dtype = np.dtype(dtype)
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if self.dtype.hasobject:
            raise ValueError(f"dtype must be one of numbers, got {self.dtype}")

    def __call__(self, sample: Mapping[str, Any], /) -> dict[str, Any]:
        """Return the sample with its field decoded."""
        array = np.frombuffer(sample[self.field], self.dtype).reshape(self.shape)
        return {**sample, self.field: array}


class DecodeExample:
    """Decode a field that holds a whole `tf.train.Example` to its features, without TensorFlow.

    For records that were indexed as raw bytes. An index of Examples reads single features by
    itself. A feature with one value becomes a scalar or a byte string, any other feature int64[n],
    float32[n] or a list of bytes.

    - `features`: the features that are wanted. Default: all.
    - `lists`: the features that stay lists even with one value.

    Raises KeyError where a record lacks one of `features`.

    >>> from twinfeed.loaders.formats.example import encode
    >>> DecodeExample()({"data": encode({"box": [0.5, 1.0], "name": b"cat"})})
    {'box': array([0.5, 1. ], dtype=float32), 'name': b'cat'}
    """

    def __init__(
        self,
        field: str = "data",
        *,
        features: tuple[str, ...] | None = None,
        lists: tuple[str, ...] = (),
    ) -> None:
        self.field = field
        self.features = features
        self.lists = lists

    def __call__(self, sample: Mapping[str, Any], /) -> dict[str, Any]:
        """Return the sample with the features in place of the field."""
        found: Mapping[str, Any] = parse(sample[self.field])
        decoded = {name: value for name, value in sample.items() if name != self.field}
        for name in found if self.features is None else self.features:
            values = found[name]
            decoded[name] = values[0] if len(values) == 1 and name not in self.lists else values
        return decoded
