"""Ready-made `decode` functions: images and Examples."""

from __future__ import annotations

import io
import math
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from twinfeed.loaders.formats.example import parse_sequence
from twinfeed.loaders.formats.sniff import IMAGES
from twinfeed.loaders.support import checks, system
from twinfeed.loaders.support.array_types import Array
from twinfeed.loaders.support.display import call_repr
from twinfeed.loaders.support.extras import requires_extra
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.samplers import validate

if TYPE_CHECKING:
    import PIL.Image
    import PIL.ImageFile

ImageMode = Literal["RGB", "L"]
Fit = Literal["stretch", "crop", "pad"]
PixelType = Literal["uint8", "native"]

# Decoded images of 1 to 64 MiB lie in memory blocks from a pool, which are reused once no array
# uses them. To map new memory for each image would cost as much as decoding. A larger block, of a
# single huge image, is not pooled: it would keep its memory for the rest of the run.
_MIN_POOLED, _MAX_POOLED = 1 << 20, 1 << 26
_FREE_BLOCKS: deque[Array] = deque(maxlen=8)

# Tags of TIFF, and of EXIF, which is written as TIFF.
_BITS_PER_SAMPLE, _PHOTOMETRIC, _ORIENTATION, _SAMPLE_FORMAT = 258, 262, 274, 339
_PLANAR_CONFIGURATION = 284
# Values of these tags: unsigned and signed integers; one plane per channel; 0 means white.
_UNSIGNED, _SIGNED, _SEPARATE_PLANES, _WHITE_IS_ZERO = 1, 2, 2, 0

_PILLOW_MISREADS = "Pillow reads wrong pixels from this kind of TIFF: convert it"


class DecodeImage:
    """Decode a JPEG, PNG or other image of a record to uint8[height, width, 3].

    simplejpeg decodes JPEG, Pillow any other of the formats that are listed as `IMAGES`. Both come
    with the extra `images`. Of pixels with 16 bits, the upper byte is taken.

    Args:
        field: the name of the field.
        mode: "RGB", or "L" for uint8[height, width].
        size: (height, width) to which Pillow's bilinear filter resizes, in pixels; a list too.
        fit: "stretch" gives the image the aspect of `size`. "crop" keeps the image's own aspect,
            and cuts off what is too long on both sides. "pad" keeps it too, and puts zeros on both
            sides.
        reducing_gap: a JPEG is decoded at 1/2, 1/4 or 1/8 of its size, if it then still has this
            many times the pixels of `size` along both sides; 2.0 is usual. This takes a quarter to
            half of the time, and pixels differ a little (libjpeg scales in the frequency domain).
            Default: every pixel is decoded.
        max_pixels: a larger image is refused by its header, before memory is taken. Pillow has a
            limit of its own, `PIL.Image.MAX_IMAGE_PIXELS`.
        dtype: "native" keeps the pixels of grey images with 16 or 32 bits: uint16, int32 or
            float32 as the file has them, three times each in mode "RGB". Other images stay uint8.
        apply_exif_orientation: turn and mirror the image as its EXIF says. Pillow does so with
            each TIFF.
        background: (red, green, blue), over which transparent pixels are composed. Default:
            transparency is dropped, which shows the colours below transparent pixels.
        strict: False also decodes JPEGs with stray bytes or broken data, as Pillow does.

    Raises:
        ModuleNotFoundError: the extra is not installed.
        ValueError: another mode, fit or dtype, an image that is too large, and pixels that the
            dtype cannot hold: 32 bits as uint8, 16 bits of several channels as "native". Bytes that
            are not an image raise Pillow's and simplejpeg's own errors. The loaders turn an error
            of a record into DecodeError, which names the record.

    >>> from PIL import Image
    >>> file = io.BytesIO()
    >>> Image.new("L", (3, 2), 255).save(file, "png")
    >>> DecodeImage(mode="L")({"image": file.getvalue()})["image"]
    array([[255, 255, 255],
           [255, 255, 255]], dtype=uint8)
    """

    @validate.show_call(
        "DecodeImage('image', size=(224, 224))",
        channels_first="images are [height, width, channel]: batch['image'].permute(0, 3, 1, 2)",
    )
    def __init__(
        self,
        field: str = "image",
        *,
        mode: ImageMode = "RGB",
        size: tuple[int, int] | None = None,
        fit: Fit = "stretch",
        reducing_gap: float | None = None,
        max_pixels: int = LIMITS.pixels,
        dtype: PixelType = "uint8",
        apply_exif_orientation: bool = False,
        background: tuple[int, int, int] | None = None,
        strict: bool = True,
    ) -> None:
        if not isinstance(field, str):
            raise TypeError(f"field must be the name of a field, got {field!r}; size= resizes")
        self.field = field
        self.mode = validate.choice("mode", mode, get_args(ImageMode))
        self._simplejpeg_colorspace = "GRAY" if mode == "L" else "RGB"  # simplejpeg's name
        self.max_pixels = validate.integer("max_pixels", max_pixels, minimum=1)
        side = size if isinstance(size, int) and size > 1 else 224
        example = f"size=({side}, {side}), with fit='crop' for torchvision's Resize and CenterCrop"
        self.size = _integers("size", size, ("height", "width"), example, minimum=1)
        self.fit = validate.choice("fit", fit, get_args(Fit))
        if size is None and (fit != "stretch" or reducing_gap is not None):
            name = "reducing_gap" if fit == "stretch" else "fit"
            raise ValueError(f"{name}= needs size=(height, width)")
        if reducing_gap is not None and not reducing_gap >= 1:
            raise ValueError(f"reducing_gap must be at least 1, got {reducing_gap!r}")
        self.reducing_gap = reducing_gap
        self.dtype = validate.choice("dtype", dtype, get_args(PixelType))
        self.apply_exif_orientation = validate.flag(
            "apply_exif_orientation", apply_exif_orientation
        )
        self.strict = validate.flag("strict", strict)
        colours = "red", "green", "blue"
        example = "background=(255, 255, 255)"
        self.background = _integers(
            "background", background, colours, example, minimum=0, below=256
        )
        with requires_extra("DecodeImage", "images"):
            import PIL  # noqa: F401
            import simplejpeg  # noqa: F401

    def __repr__(self) -> str:
        return call_repr(self)

    def __call__(self, sample: Mapping[str, Any], /) -> dict[str, Any]:
        """Return the sample with its field decoded."""
        return {**sample, self.field: self._decode(_encoded_image(sample, self.field))}

    def into(self, sample: Mapping[str, Any], slot: Array, /) -> dict[str, Any]:
        """Return the decoded sample. An image of the shape and dtype of `slot` is written there.

        `slot` is a row of the array of the batch.
        """
        array = self._decode(_encoded_image(sample, self.field), slot)
        if array is not slot and (array.shape, array.dtype) == (slot.shape, slot.dtype):
            slot[...] = array
            array = slot
        return {**sample, self.field: array}

    def _decode(self, data: bytes, slot: Array | None = None) -> Array:
        """Return an image as an array: decoded, turned by its EXIF orientation, and resized."""
        from PIL import Image, ImageOps

        is_jpeg = data[:2] == b"\xff\xd8"
        image: Any = self._open(data) if self.apply_exif_orientation or not is_jpeg else None
        orientation = 1  # upright
        if self.apply_exif_orientation and image.format != "TIFF":  # Pillow turns a TIFF by itself
            orientation = image.getexif().get(_ORIENTATION, 1)
        array = self._decode_jpeg(data, orientation, slot) if is_jpeg else None
        if array is None:  # another format, or a broken JPEG
            image = self._decode_by_pillow(image or self._open(data))
        elif orientation == 1 and self.size in (None, array.shape[:2]):
            return array  # nothing is left to do
        else:
            image = Image.fromarray(array)
        if orientation != 1:
            image.getexif()[_ORIENTATION] = orientation  # the decoded image has lost the tag
            image = ImageOps.exif_transpose(image)
        # Whether the image takes more than `_MAX_POOLED` bytes: Pillow takes four for each pixel.
        # Such memory is given back to the system, and not kept for the next image.
        is_huge = 4 * image.height * image.width > _MAX_POOLED
        if self.size is not None and image.size != self.size[::-1]:  # Pillow: (width, height)
            image = self._resized(image, *self.size)
        array = np.asarray(image)
        if is_huge:
            del image
            system.release_freed_memory()
        if self.mode == "RGB" and array.ndim == 2:  # a grey image with more than 8 bits
            array = np.repeat(array[..., None], 3, axis=2)
        return array

    def _open(self, data: bytes) -> PIL.ImageFile.ImageFile:
        """Open an image by Pillow, which only reads its header; its pixels are decoded later."""
        from PIL import Image, UnidentifiedImageError

        try:
            return Image.open(io.BytesIO(data), formats=[*IMAGES])
        except Image.DecompressionBombError as error:
            advice = "PIL.Image.MAX_IMAGE_PIXELS sets this limit, max_pixels= another"
            raise Image.DecompressionBombError(f"{error} {advice}") from None
        except UnidentifiedImageError:
            problem = f"field {self.field!r} is not an image, it begins with {data[:16]!r}"
            raise UnidentifiedImageError(problem) from None

    def _decode_by_pillow(self, image: PIL.ImageFile.ImageFile) -> PIL.Image.Image:
        """Decode an image by Pillow, and convert it to `mode`.

        1. An image of one channel with more than 8 bits is decoded by `_decode_grey`.
        2. Two kinds of TIFF are refused, since Pillow reads wrong pixels from them: signed
           integers; and uncompressed channels of 16 bits that are stored plane by plane, all red
           values first, in place of pixel by pixel.
        3. Several channels of 16 bits are refused with dtype "native", since Pillow only returns
           the upper 8 bits of each.
        4. Transparent pixels are composed over `background`, or lose their transparency.

        Raises:
            ValueError: an image that is refused, or a transparency that Pillow would get wrong.
        """
        from PIL import Image

        self._check_size(image.height, image.width)
        tags, has_16_bits = getattr(image, "tag_v2", {}), _has_16_bits(image)  # only TIFF has tags
        # 1. One channel of 32 bits (integers or floats) or of 16 bits, such as "I;16".
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            return self._decode_grey(image, tags)
        # 2. Pillow reads signed integers as unsigned. Its decoder "raw" is for uncompressed pixels.
        is_signed = tags.get(_SAMPLE_FORMAT, (_UNSIGNED,))[0] == _SIGNED
        has_planes = tags.get(_PLANAR_CONFIGURATION) == _SEPARATE_PLANES
        if is_signed or (has_16_bits and has_planes and image.tile[0].codec_name == "raw"):
            raise ValueError(_PILLOW_MISREADS)
        if self.dtype == "native" and has_16_bits:  # 3.
            problem = "Pillow only gives the upper bytes of several channels of 16 bits"
            raise ValueError(f"{problem}: dtype='uint8' takes these")
        if self.background is not None and image.has_transparency_data:  # 4.
            # Pixels are transparent by an alpha channel, a palette (mode "P"), or because they have
            # a certain colour. Pillow scales the pixels to 8 bits, but not this colour. Its decoder
            # has a ";" in its arguments, as in "RGB;16B", if the pixels are of other than 8 bits.
            has_transparent_colour = "transparency" in image.info and image.mode != "P"
            if has_transparent_colour and ";" in str(image.tile):
                raise ValueError("a transparent colour of other than 8 bits: leave out background=")
            background = Image.new("RGBA", image.size, (*self.background, 255))
            return Image.alpha_composite(background, image.convert("RGBA")).convert(self.mode)
        image.info.pop("transparency", None)  # Pillow would warn that it is dropped
        return image.convert(self.mode)

    def _decode_grey(
        self, image: PIL.ImageFile.ImageFile, tags: Mapping[int, Any]
    ) -> PIL.Image.Image:
        """Decode an image of one channel with 16 or 32 bits per pixel.

        With dtype "native", pixels stay as they are. With "uint8", the upper 8 bits of 16-bit
        pixels are taken, and pixels of 32 bits are refused. The type of a pixel is in Pillow's
        mode:

        - "I;16": an unsigned integer of 16 bits; "I;16B": the same, big-endian.
        - "I": an integer of 32 bits, with one exception: for a PPM file it has 16 bits, and Pillow
          scales its largest value to 65535. With "native", this is undone.
        - "F": a float of 32 bits.

        Args:
            image: the image that Pillow has opened.
            tags: the tags of a TIFF, by number; empty for other formats.

        Raises:
            ValueError: Pillow reads wrong pixels, or the dtype cannot hold them.
        """
        from PIL import Image

        if self.background is not None and image.has_transparency_data:
            raise ValueError("the image has 16 bits and a transparent grey: leave out background=")
        largest = _largest_value_of_ppm(image)  # the decoded image has lost it
        pixels = np.asarray(image)
        # Pillow does not invert an image whose zeros are white. It takes unsigned integers of 32
        # bits as signed, so that those from 2^31 on become negative.
        is_inverted = tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO
        is_unsigned = image.mode == "I" and tags.get(_SAMPLE_FORMAT, (_UNSIGNED,))[0] == _UNSIGNED
        if is_inverted or (is_unsigned and pixels.min() < 0):
            raise ValueError(_PILLOW_MISREADS)
        if self.dtype == "native":
            if image.mode == "I" and largest:
                return Image.fromarray(np.rint(pixels * (largest / 65535)).astype(np.int32))
            is_big_endian = image.mode == "I;16B"  # Pillow cannot resize this mode: convert it
            return Image.fromarray(pixels.astype(np.uint16)) if is_big_endian else image
        # The mode "I" means 32 bits, with one exception: Pillow also uses it for a file of the
        # format PPM with 16 bits.
        if image.mode == "F" or (image.mode == "I" and image.format != "PPM"):
            problem = f"pixels of 32 bits or with a sign (mode {image.mode!r}) do not fit uint8"
            raise ValueError(f"{problem}: dtype='native' keeps them")
        # Keep the upper 8 bits of each pixel: of 16 bits, or of 12, which a TIFF may have.
        bits = tags.get(_BITS_PER_SAMPLE, (16,))[0]
        return Image.fromarray((pixels >> (bits - 8)).astype(np.uint8))

    def _resized(self, image: PIL.Image.Image, height: int, width: int) -> PIL.Image.Image:
        """Return the image resized to (height, width) by the bilinear filter, as `fit` says."""
        from PIL import Image

        bilinear = Image.Resampling.BILINEAR
        if self.fit == "stretch":
            return image.resize((width, height), bilinear)
        # Whether the image has a wider aspect than the size.
        is_wider = image.width * height > width * image.height
        if self.fit == "crop":  # resize the central box that has the aspect of the size
            box_width = image.height * width / height if is_wider else image.width
            box_height = image.height if is_wider else image.width * height / width
            left, top = (image.width - box_width) / 2, (image.height - box_height) / 2
            box = left, top, left + box_width, top + box_height
            return image.resize((width, height), bilinear, box=box)
        # fit="pad": resize the image to fit into the size, and paste it into the centre of zeros.
        inner_width = width if is_wider else max(1, round(image.width * height / image.height))
        inner_height = max(1, round(image.height * width / image.width)) if is_wider else height
        resized = image.resize((inner_width, inner_height), bilinear)
        padded = Image.new(image.mode, (width, height))
        padded.paste(resized, ((width - inner_width) // 2, (height - inner_height) // 2))
        return padded

    def _decode_jpeg(self, data: bytes, orientation: int, slot: Array | None) -> Array | None:
        """Decode a JPEG by simplejpeg, at a fraction of its size if `reducing_gap` allows it."""
        import simplejpeg

        try:
            height, width = simplejpeg.decode_jpeg_header(data)[:2]
            self._check_size(height, width)
            # The EXIF orientations 5 to 8 turn the image by 90 degrees.
            turned_size = (width, height) if orientation in range(5, 9) else (height, width)
            divisor = self._divisor(*turned_size)
            size = -(-height // divisor), -(-width // divisor)  # rounded up, as libjpeg does
            shape = size if self.mode == "L" else (*size, 3)
            is_final = orientation == 1 and self.size in (None, size)
            if slot is not None and (not is_final or slot.shape != shape or slot.dtype != np.uint8):
                slot = None
            buffer, nbytes = slot, math.prod(shape)
            if slot is None and nbytes >= _MIN_POOLED:
                buffer = _array_from_pool(nbytes)
            array = simplejpeg.decode_jpeg(
                data,
                colorspace=self._simplejpeg_colorspace,
                min_height=size[0],  # libjpeg takes the largest divisor with at least this size
                min_width=size[1],
                buffer=buffer,
            )
        except ValueError as error:
            if not self.strict:
                return None
            with suppress(Exception):
                self._decode_by_pillow(self._open(data))
                error = ValueError(f"{error}: strict=False decodes it as Pillow does")
            raise error from None
        # With `slot`, `array` is another object over the same memory.
        return array.reshape(shape) if slot is None else slot

    def _divisor(self, height: int, width: int) -> int:
        """Return the divisor (8, 4, 2 or 1) of height and width to which libjpeg decodes an image.

        Decoding fewer pixels takes less time, but enough must remain to resize the image well: at
        least `reducing_gap` times as many along each side as the resized image has. For example, an
        image of 1000 x 2000 that is stretched to (100, 100) with a gap of 2 needs 200 pixels along
        each side. It is divided by 4, to 250 x 500: divided by 8, its height would be only 125.
        """
        if self.size is None or self.reducing_gap is None:
            return 1
        scales = self.size[0] / height, self.size[1] / width  # (0.1, 0.05)
        # "pad" resizes both sides by the smaller scale, so that the whole image is within `size`.
        # "crop" takes the larger one, so that the image covers `size`. "stretch" takes both: the
        # larger one decides how many pixels are needed.
        scale = min(scales) if self.fit == "pad" else max(scales)  # 0.1
        required = self.reducing_gap * scale  # 0.2: the fraction of each side that is needed
        # The largest divisor that leaves this fraction: 8 x 0.2 is more than 1, and 4 x 0.2 is not.
        return next((divisor for divisor in (8, 4, 2) if divisor * required <= 1), 1)

    def _check_size(self, height: int, width: int) -> None:
        """Raise ValueError for an image with more than `max_pixels`."""
        if height * width > self.max_pixels:
            limit = f"max_pixels={self.max_pixels}"
            raise ValueError(f"the image has {height} x {width} pixels, more than {limit}")


def _integers(
    name: str, values: tuple[int, ...] | None, parts: tuple[str, ...], example: str, **limits: int
) -> tuple[int, ...] | None:
    """Return a user's integers, such as size=(height, width), as a tuple."""
    if values is None:
        return None
    if not isinstance(values, (tuple, list)) or len(values) != len(parts):
        raise ValueError(f"{name} must be ({', '.join(parts)}), got {values!r}: write {example}")
    return tuple(
        validate.integer(f"{part} of {name}", value, **limits)
        for part, value in zip(parts, values, strict=True)
    )


def _encoded_image(sample: Mapping[str, Any], field: str) -> Any:
    """Return the bytes of the image in a field of a sample."""
    data = sample[field]
    data = data.get("bytes") if isinstance(data, Mapping) else data
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(
            f"field {field!r} must hold the bytes of an image, got {sample[field]!r:.200}: "
            f"cast_column({field!r}, Image(decode=False)) of a Hugging Face dataset gives them"
        )
    return data


def _has_16_bits(image: PIL.ImageFile.ImageFile) -> bool:
    """Return whether the file of an image that is not decoded yet has channels of 16 bits."""
    # The arguments of Pillow's decoder have the name of the pixel layout, such as "RGB;16B" for
    # big-endian numbers of 16 bits.
    return _largest_value_of_ppm(image) > 255 or ";16" in str(image.tile)


def _largest_value_of_ppm(image: PIL.ImageFile.ImageFile) -> int:
    """Return the value for white of a PPM file that is not decoded yet, or 0 for other formats."""
    arguments = image.tile[0].args if image.format == "PPM" and image.tile else ""
    return int(arguments[1]) if isinstance(arguments, tuple) else 0


def _array_from_pool(nbytes: int) -> Array:
    """Return an array uint8[nbytes], if it can in the memory of an earlier image."""
    block = np.empty(0, np.uint8)  # stays if the pool is empty: too small, so replaced below
    with suppress(IndexError):
        block = _FREE_BLOCKS.pop()
    # A block of another size is not put back, but freed: the images have other sizes by now.
    if not nbytes <= len(block) <= 2 * nbytes:
        block = np.empty(nbytes, np.uint8)
    # numpy keeps `owner` alive as long as the result, or a view of it, exists. When it is garbage,
    # `finalize` calls `_FREE_BLOCKS.append(block)`; but not at the end of the program (`atexit`).
    owner = _ArrayOwner(block[:nbytes])
    if len(block) <= _MAX_POOLED:
        weakref.finalize(owner, _FREE_BLOCKS.append, block).atexit = False
    return np.asarray(owner)


class _ArrayOwner:
    """The base object of arrays over some memory: it is finalized when the last one is garbage."""

    def __init__(self, memory: Array) -> None:
        self.memory = memory
        self.__array_interface__ = memory.__array_interface__


class DecodeExample:
    """Decode a whole `tf.train.Example` in a field to its features, without TensorFlow.

    For records that were indexed as raw bytes. An index of Examples reads single features by
    itself. A feature with one value becomes a scalar or a byte string, any other feature int64[n],
    float32[n] or a list of bytes.

    A `tf.train.SequenceExample` gives the features of its context in this way. A feature list of T
    steps becomes a number array [T], or [T, n] where each step has n numbers, a list of T byte
    strings, or else a list of the steps' values.

    Args:
        field: the name of the field.
        features: the features that are wanted. Default: all.
        lists: the features that stay lists even with one value.

    Raises:
        KeyError: a record lacks one of `features`.
        DataCorruptionError: the bytes are another message, in which no feature is found, or one
            whose name is not printable.

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
        self.features = None if features is None else checks.names("features", features)
        self.lists = checks.names("lists", lists)

    def __repr__(self) -> str:
        return call_repr(self)

    def __call__(self, sample: Mapping[str, Any], /) -> dict[str, Any]:
        """Return the sample with the features in place of the field."""
        features: Mapping[str, Any] = _parse_example(sample[self.field])
        decoded = {name: value for name, value in sample.items() if name != self.field}
        for name in features if self.features is None else self.features:
            values = features[name]
            if isinstance(values, _FeatureList):
                decoded[name] = values.stacked()
            else:
                decoded[name] = values[0] if len(values) == 1 and name not in self.lists else values
        return decoded


class _FeatureList(list[Any]):
    """A feature list of a SequenceExample: for each step an array of numbers or a list of bytes."""

    def stacked(self) -> Any:
        """Return the values of all steps as one array, or as a list if they cannot be stacked.

        - Numbers become an array [steps, n] if each step has n numbers; [steps] if n is 1. Steps
          with different numbers of values become a list of arrays.
        - Byte strings become a list of strings if each step has one. Otherwise they become a list
          that has a list of strings for each step.
        """
        kinds = {str(getattr(values, "dtype", "bytes")) for values in self if len(values)}
        if len(kinds) > 1:
            raise ValueError(f"a feature list has {' and '.join(sorted(kinds))} in its steps")
        lengths = {len(values) for values in self}
        is_scalar = lengths <= {1}  # each step has a single value
        if not self or isinstance(self[0], list):  # no steps, or byte strings
            return [values[0] for values in self] if is_scalar else list(self)
        if len(lengths) > 1:
            return list(self)
        return np.stack(self)[:, 0] if is_scalar else np.stack(self)


def _parse_example(data: bytes) -> dict[str, Any]:
    """Return the features of a serialized `tf.train.Example` or `SequenceExample`, by name."""
    context, lists = parse_sequence(data)
    duplicates = context.keys() & lists.keys()
    if duplicates:
        raise ValueError(f"{min(duplicates)!r} is in the context and in the feature lists")
    return context | {name: _FeatureList(steps) for name, steps in lists.items()}
