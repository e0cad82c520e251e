"""DecodeImage: each kind of pixel that Pillow gives, orientation, transparency, damaged JPEGs."""

import io
import itertools
import struct
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from twinfeed.loaders import DecodeImage
from twinfeed.loaders.formats.sniff import IMAGES

WIDE = np.array([[0, 255, 256], [1000, 30000, 65535]], np.uint16)
UPPER = [[0, 0, 1], [3, 117, 255]]
PHOTO = (np.indices((32, 24)).sum(0) * 4).astype(np.uint8)[..., None].repeat(3, 2)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):  # some modes are on their way out
        image.save(file, kind, **options)
    return file.getvalue()


def decoded(data: bytes, **options: Any) -> np.ndarray:
    return DecodeImage(**options)({"image": data})["image"]


def png(pixels: np.ndarray, colour: int, key: tuple[int, ...] = (), depth: int = 16) -> bytes:
    """A PNG with 16 bits a channel, or with bytes of several pixels: Pillow writes neither."""
    height, width = pixels.shape[:2]
    kind = ">u2" if depth == 16 else "u1"
    rows = b"".join(b"\0" + row.astype(kind).tobytes() for row in pixels)
    across = width if depth == 16 else width * 8 // depth
    header = struct.pack(">IIBBBBB", across, height, depth, colour, 0, 0, 0)
    trns = [(b"tRNS", struct.pack(f">{len(key)}H", *key))] if key else []
    chunks = ((b"IHDR", header), *trns, (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )


def tiff(pixels: np.ndarray, *, bits: int, photometric: int = 1, kind: int = 1) -> bytes:
    """A TIFF of one channel whose tags are these."""
    data = pixels.tobytes()
    tags = {256: pixels.shape[1], 257: pixels.shape[0], 258: bits, 259: 1, 262: photometric}
    tags |= {273: 8, 277: 1, 278: pixels.shape[0], 279: len(data), 339: kind}
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return (
        struct.pack("<2sHI", b"II", 42, 8 + len(data))
        + data
        + struct.pack("<H", len(tags))
        + directory
        + bytes(4)
    )


BITS_12 = tiff(np.frombuffer(bytes([0x12, 0x34, 0x56]), np.uint8)[None], bits=12)
BITS_12 = BITS_12.replace(struct.pack("<HHII", 256, 4, 1, 3), struct.pack("<HHII", 256, 4, 1, 2))
PGM = b"P5 3 2 65535\n" + WIDE.astype(">u2").tobytes()
FLOATS = np.linspace(-1, 2, 6, dtype=np.float32).reshape(2, 3)
SIGNED = np.array([[-5, 0, 1], [2, 3, 70000]], np.int32)

GREY_16 = {
    "PNG": saved(Image.fromarray(WIDE), "png"),
    "TIFF": saved(Image.fromarray(WIDE), "tiff"),
    "big-endian TIFF": saved(Image.frombytes("I;16B", (3, 2), WIDE.astype(">u2")), "tiff"),
    "compressed TIFF": saved(Image.fromarray(WIDE), "tiff", compression="tiff_lzw"),
    "PGM": PGM,
}


@pytest.mark.parametrize("data", GREY_16.values(), ids=GREY_16)
def test_16_bit_grey_becomes_upper_byte_or_stays_native(data: bytes) -> None:
    assert decoded(data, mode="L").tolist() == UPPER
    assert decoded(data)[..., 2].tolist() == UPPER
    native = decoded(data, mode="L", dtype="native")
    assert native.dtype == (np.int32 if data is PGM else np.uint16)
    assert native.dtype.isnative
    assert native.tolist() == WIDE.tolist()
    assert decoded(data, dtype="native").tolist() == WIDE[..., None].repeat(3, 2).tolist()


@pytest.mark.frameworks
@pytest.mark.parametrize("colour", [0, 2, 4, 6], ids=["L", "RGB", "LA", "RGBA"])
def test_16_bit_png_equals_tensorflow(colour: int) -> None:
    tf = pytest.importorskip("tensorflow")
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    data = png(np.resize(WIDE, (4, 3, channels)), colour)
    theirs = tf.io.decode_png(data, channels=4).numpy()[..., :3]
    assert decoded(data).tolist() == theirs.tolist()


def test_16_bit_channels_become_upper_bytes_and_refuse_native() -> None:
    pixels = np.resize(WIDE, (2, 3, 3))
    ppm = b"P6 3 2 65535\n" + pixels.astype(">u2").tobytes()
    for data in (png(pixels, 2), ppm):
        rounded = data is ppm  # Pillow divides by 257
        assert np.abs(decoded(data) - (pixels >> 8).astype(int)).max() <= rounded
        with pytest.raises(ValueError, match="several channels of 16 bits"):
            decoded(data, dtype="native")


@pytest.mark.parametrize("largest", [256, 1023, 4095, 65534, 65535])
def test_native_pgm_has_the_numbers_of_the_file(largest: int) -> None:
    """Pillow scales the largest value to 65535, and "uint8" has the upper byte of this."""
    pixels = np.unique(np.linspace(0, largest, 300).astype(np.int32))[None]
    header = f"{pixels.shape[1]} 1\n{largest}\n".encode()
    binary = b"P5\n" + header + pixels.astype(">u2").tobytes()
    text = b"P2\n" + header + " ".join(map(str, pixels[0])).encode() + b"\n"
    for data in (binary, text):
        np.testing.assert_array_equal(decoded(data, mode="L", dtype="native"), pixels)
        assert decoded(data, mode="L")[0, [0, -1]].tolist() == [0, 255]


def test_32_bit_pixels_are_refused_unless_native() -> None:
    signed_16 = SIGNED.clip(-5, 5).astype(np.int16)
    for data, pixels in (
        (saved(Image.fromarray(SIGNED), "tiff"), SIGNED),
        (saved(Image.fromarray(FLOATS), "tiff"), FLOATS),
        (tiff(signed_16, bits=16, kind=2), signed_16.astype(np.int32)),
        (tiff(np.abs(SIGNED), bits=32), np.abs(SIGNED)),
    ):
        with pytest.raises(ValueError, match=r"32 bits or with a sign.*dtype='native' keeps them"):
            decoded(data)
        native = decoded(data, mode="L", dtype="native")
        assert native.dtype == pixels.dtype
        np.testing.assert_array_equal(native, pixels)


def test_12_bit_pixels_are_shifted_by_4() -> None:
    assert decoded(BITS_12, mode="L").tolist() == [[0x12, 0x45]]
    assert decoded(BITS_12, mode="L", dtype="native").tolist() == [[0x123, 0x456]]


def test_big_endian_pixels_are_resized_like_little_endian() -> None:
    small, big = (GREY_16[name] for name in ("TIFF", "big-endian TIFF"))
    for fit in ("stretch", "crop", "pad"):
        both = (decoded(data, size=(3, 2), fit=fit, dtype="native") for data in (small, big))
        np.testing.assert_array_equal(*both)


@pytest.mark.parametrize("dtype", ["uint8", "native"])
def test_tiffs_that_pillow_reads_wrongly_are_refused(dtype: str) -> None:
    for data in (
        tiff(WIDE, bits=16, photometric=0),
        tiff(np.full((2, 3), 2**32 - 1, np.uint32), bits=32),
        tiff(np.array([[-1, -128, 127]], np.int8), bits=8, kind=2),
    ):
        with pytest.raises(ValueError, match="Pillow reads wrong pixels"):
            decoded(data, dtype=dtype)


def every_kind() -> dict[tuple[str, str], bytes]:
    """A file of each format and mode in which Pillow opens what it can write."""
    files: dict[tuple[str, str], bytes] = {}
    grey = Image.fromarray(PHOTO[..., 0])
    for kind, mode in itertools.product(IMAGES, [*Image.MODES, "PA", "La", "RGBa", "I;16B"]):
        try:
            data = saved(grey.convert("RGBA").convert(mode), kind)
        except (OSError, ValueError, KeyError):  # no such conversion, or not in this format
            try:
                data = saved(Image.new(mode, (24, 32)), kind)
            except (OSError, ValueError, KeyError):
                continue
        files.setdefault((kind, Image.open(io.BytesIO(data)).mode), data)
    return files


EIGHT_BITS = {"1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LA", "PA"}


@pytest.mark.parametrize(("kind", "data"), every_kind().items(), ids=lambda kind: str(kind)[:20])
def test_each_pillow_mode_is_decoded_or_refused(kind: tuple[str, str], data: bytes) -> None:
    mode = kind[1]
    if mode in EIGHT_BITS:
        for wanted in ("RGB", "L"):
            image = Image.open(io.BytesIO(data))
            image.info.pop("transparency", None)
            theirs = np.asarray(image.convert(wanted), np.int16)
            for options in ({}, {"dtype": "native"}, {"strict": False}):
                image = decoded(data, mode=wanted, **options)
                assert image.dtype == np.uint8
                assert np.abs(image - theirs).max() <= (1 if kind[0] == "JPEG" else 0)
    elif mode.startswith("I;16") or kind == ("PPM", "I"):
        theirs = np.asarray(Image.open(io.BytesIO(data))) >> 8
        np.testing.assert_array_equal(decoded(data, mode="L"), theirs)
    else:
        assert mode in ("I", "F", "LAB")  # a mode that is new is to be looked at
        with pytest.raises(ValueError, match=r"dtype='native'|conversion from LAB"):
            decoded(data, mode="L")


def test_wide_pixels_are_resized_without_conversion() -> None:
    for fit in ("stretch", "crop", "pad"):
        for pixels in (WIDE, SIGNED, FLOATS):
            data = saved(Image.fromarray(pixels), "tiff")
            image = decoded(data, size=(4, 4), fit=fit, dtype="native")
            assert (image.shape, image.dtype) == ((4, 4, 3), pixels.dtype)
            assert pixels.min() <= image[image != 0].min()
            assert image.max() <= pixels.max()


# Orientation


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "tiff"])
@pytest.mark.parametrize("orientation", range(10))
def test_exif_orientation_is_applied_on_request(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[274] = orientation
    options = {"lossless": True} if kind == "webp" else {}
    data = saved(Image.fromarray(PHOTO), kind, exif=exif, **options)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    for mode in ("RGB", "L"):
        theirs = np.asarray(upright.convert(mode), np.int16)
        image = decoded(data, mode=mode, apply_exif_orientation=True)
        assert image.shape[:2] == theirs.shape[:2]
        assert np.abs(image - theirs).max() <= (1 if kind == "jpeg" else 0)
    assert decoded(data, size=(5, 9), apply_exif_orientation=True).shape == (5, 9, 3)
    plain = decoded(data)
    if kind == "tiff":  # Pillow turns it
        assert plain.shape[:2] == theirs.shape[:2]
    else:
        assert plain.shape == PHOTO.shape


def test_exif_orientation_applies_to_16_bits_and_reduced_jpeg() -> None:
    exif = Image.Exif()
    exif[274] = 6
    data = saved(Image.fromarray(WIDE), "png", exif=exif)
    turned = decoded(data, mode="L", dtype="native", apply_exif_orientation=True)
    assert turned.tolist() == np.rot90(WIDE, -1).tolist()
    photo = saved(Image.fromarray(PHOTO.repeat(8, 0).repeat(8, 1)), "jpeg", exif=exif)
    small = decoded(photo, size=(12, 32), reducing_gap=2.0, apply_exif_orientation=True)
    whole = decoded(photo, size=(12, 32), apply_exif_orientation=True)
    assert np.abs(small.astype(int) - whole).mean() < 4


# Transparency


def test_background_is_composed_below_transparent_pixels() -> None:
    colours = np.array([[[10, 20, 30, 0], [10, 20, 30, 255], [200, 100, 0, 128]]], np.uint8)
    image = Image.fromarray(colours)
    white = decoded(saved(image, "png"), background=(255, 255, 255))
    assert white[0, :2].tolist() == [[255, 255, 255], [10, 20, 30]]
    assert np.abs(white[0, 2].astype(int) - [227, 177, 127]).max() <= 1
    assert decoded(saved(image, "png"))[0, 0].tolist() == [10, 20, 30]  # dropped
    assert decoded(saved(image, "png"), mode="L", background=(0, 0, 0))[0, 0] == 0
    assert decoded(saved(image, "png"), background=(255, 255, 255), dtype="native").tolist() == (
        white.tolist()
    )
    palette = saved(image.quantize(4), "png")
    assert decoded(palette, background=(255, 0, 0))[0, 0].tolist() == [255, 0, 0]
    key = saved(Image.fromarray(colours[..., :3]), "png", transparency=(10, 20, 30))
    assert decoded(key, background=(9, 9, 9))[0, 1].tolist() == [9, 9, 9]
    grey = saved(Image.fromarray(colours[..., :2], "LA"), "png")
    assert decoded(grey, background=(9, 8, 7))[0, :2].tolist() != decoded(grey)[0, :2].tolist()
    opaque = saved(Image.fromarray(PHOTO), "jpeg")
    assert decoded(opaque, background=(1, 2, 3)).tolist() == decoded(opaque).tolist()


def test_transparent_16_bit_grey_refuses_background() -> None:
    data = saved(Image.fromarray(WIDE), "png", transparency=256)
    assert decoded(data, mode="L").tolist() == UPPER
    grey = png(np.array([[0x3F]]), 0, key=(3,), depth=4)
    for transparent in (data, png(np.resize(WIDE, (2, 3, 3)), 2, key=(0, 255, 256)), grey):
        with pytest.raises(ValueError, match="leave out background="):
            decoded(transparent, background=(0, 0, 0))


# Damaged JPEGs


def test_stray_bytes_in_jpeg_are_decoded_on_request() -> None:
    good = saved(Image.fromarray(PHOTO), "jpeg")
    at = good.index(b"\xff\xdb")
    stray = good[:at] + bytes(3) + good[at:]
    with pytest.raises(ValueError, match=r"extraneous bytes.*: strict=False decodes it"):
        decoded(stray)
    for options in ({}, {"mode": "L"}, {"size": (8, 8)}, {"apply_exif_orientation": True}):
        ours, clean = (decoded(data, strict=False, **options) for data in (stray, good))
        np.testing.assert_array_equal(ours, clean)
    for header in (b"\x03\x01\x31", b"\x03\x01\x22\x00\x02\x22"):  # odd sampling factors
        frame = good.index(b"\xff\xc0") + 9
        odd = good[:frame] + header + good[frame + len(header) :]
        with pytest.raises(ValueError, match=r"subsampling level.*: strict=False decodes it"):
            decoded(odd)
        assert decoded(odd, strict=False).shape == PHOTO.shape
    with pytest.raises(ValueError, match=r"^(?!.*strict)"):  # Pillow refuses it too
        decoded(good[: len(good) // 2])
    with pytest.raises(OSError, match=r"(?i)truncated"):
        decoded(good[: len(good) // 2], strict=False)
    with pytest.raises(ValueError, match="max_pixels=9"):
        decoded(stray, strict=False, max_pixels=9)


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"dtype": "uint16"}, ValueError, "dtype must be .*'native'"),
        ({"dtype": np.uint8}, ValueError, "dtype must be"),
        ({"background": "white"}, ValueError, r"background must be \(red, green, blue\)"),
        ({"background": (0, 0)}, ValueError, "background must be"),
        ({"background": (0, 0, 256)}, ValueError, "background must be below 256"),
        ({"background": (0.5, 0, 0)}, TypeError, "background"),
        ({"apply_exif_orientation": 1}, TypeError, "apply_exif_orientation must be"),
        ({"strict": "no"}, TypeError, "strict must be"),
    ],
)
def test_decode_image_refuses_bad_arguments(
    options: Any, error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=word):
        DecodeImage(**options)
