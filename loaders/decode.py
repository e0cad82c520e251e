"""Batteries for `decode`: images, raw arrays and whole Examples; extensions.py has webdataset's."""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.formats.example import parse

_this_thread = threading.local()


class DecodeImage:
    """Decode a JPEG or PNG field of a record to uint8[height, width, 3].

    `mode` is "RGB" or "L" (then the array is uint8[height, width]); `size` (height, width)
    resizes with Pillow's bilinear filter, the same in both frameworks. JPEG goes through
    simplejpeg, anything else through Pillow, whose limit against decompression bombs holds.
    Needs the extra `images`. Raises ValueError for another mode, and Pillow's and simplejpeg's
    own errors for bytes that are no image, which the loaders turn into DecodeError with the
    record's place.

    >>> from PIL import Image
    >>> file = io.BytesIO()
    >>> Image.new("L", (3, 2), 255).save(file, "png")
    >>> DecodeImage(mode="L")({"image": file.getvalue()})["image"]
    array([[255, 255, 255],
           [255, 255, 255]], dtype=uint8)
    """

    def __init__(
        self, field: str = "image", *, mode: str = "RGB", size: tuple[int, int] | None = None
    ) -> None:
        if mode not in ("RGB", "L"):
            raise ValueError(f"mode must be 'RGB' or 'L', got {mode!r}")
        self.field = field
        self.mode = mode
        if size is not None and (not isinstance(size, tuple) or len(size) != 2):
            raise ValueError(f"size must be (height, width), got {size!r}")
        self.size = size

    def __call__(self, sample: Mapping[str, Any], /) -> dict[str, Any]:
        """Return the sample with its field decoded."""
        return {**sample, self.field: self._decode(sample[self.field])}

    @property
    def writes(self) -> tuple[str, ...]:
        """The fields that `into` can write."""
        return (self.field,)

    def into(
        self, sample: Mapping[str, Any], slots: Mapping[str, npt.NDArray[Any]], /
    ) -> dict[str, Any]:
        """Decode into the field's slot of a batch, and return that; where it fits."""
        slot = slots[self.field]
        array = self._decode(sample[self.field], slot)
        if array is not slot and (array.shape, array.dtype) == (slot.shape, slot.dtype):
            slot[...] = array
            array = slot
        return {**sample, self.field: array}

    def _decode(
        self, data: bytes, slot: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[np.uint8]:
        from PIL import Image

        if data[:2] == b"\xff\xd8":
            array = self._jpeg(data, slot)
            if self.size is None or array.shape[:2] == self.size:
                return array
            image = Image.fromarray(array)
        else:
            image = Image.open(io.BytesIO(data)).convert(self.mode)
        if self.size is not None and image.size != self.size[::-1]:
            image = image.resize(self.size[::-1], Image.Resampling.BILINEAR)
        return np.asarray(image)

    def _jpeg(self, data: bytes, slot: npt.NDArray[np.uint8] | None) -> npt.NDArray[np.uint8]:
        """Decode, within Pillow's limit; into this thread's buffer where a resize follows."""
        import simplejpeg
        from PIL import Image

        height, width = simplejpeg.decode_jpeg_header(data)[:2]
        if height * width > 2 * (Image.MAX_IMAGE_PIXELS or height * width):
            raise Image.DecompressionBombError(
                f"image of {height} x {width} pixels: more than twice Image.MAX_IMAGE_PIXELS, "
                f"{Image.MAX_IMAGE_PIXELS}"
            )
        grey = self.mode == "L"
        nbytes = height * width * (1 if grey else 3)
        resized = self.size is not None and (height, width) != self.size
        fits = slot is not None and slot.shape == (height, width, 3)[: 2 if grey else 3]
        buffer = _scratch(nbytes) if resized else slot if fits else None
        array = simplejpeg.decode_jpeg(data, colorspace="GRAY" if grey else "RGB", buffer=buffer)
        if buffer is slot and slot is not None:
            return slot
        return array[..., 0] if grey else array  # type: ignore[no-any-return]


def _scratch(nbytes: int) -> npt.NDArray[np.uint8]:
    """This thread's buffer: one that is mapped anew for each image costs as much as decoding it."""
    held: npt.NDArray[np.uint8] | None = getattr(_this_thread, "buffer", None)
    if held is None or len(held) < nbytes:
        held = _this_thread.buffer = np.empty(nbytes, np.uint8)
    return held


class DecodeArray:
    """Decode a field of raw numbers to an array of `dtype` and `shape`; one axis may be -1.

    The array is read-only, a view of the bytes that were read. Raises ValueError for a dtype of
    Python objects, and for bytes that do not fill the shape, which the loaders turn into
    DecodeError with the record's place.

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

    For records that were indexed as raw bytes; an index of Examples reads single features by
    itself. A feature with one value becomes a scalar or a byte string, any other int64[n],
    float32[n] or a list of bytes; `features` names those wanted (default: all), `lists` those that
    stay lists also with one value. Raises KeyError where a record lacks one of `features`.

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
        found = parse(sample[self.field])
        rest = {name: value for name, value in sample.items() if name != self.field}
        names = found if self.features is None else self.features
        return rest | {name: self._value(name, found[name]) for name in names}

    def _value(self, name: str, values: Any) -> Any:
        """The value itself where there is just one."""
        return values[0] if len(values) == 1 and name not in self.lists else values
