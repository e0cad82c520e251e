"""The batteries: what each extension and option gives, what is refused, and what an error names."""

import io
import json
import struct
import subprocess
import sys
import zlib
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, UnidentifiedImageError
from support import GOLDEN
from support.inside import batcher_of
from support.refusals import Call, Refused

from twinfeed.loaders import (
    DataCorruptionError,
    DecodeError,
    DecodeExample,
    DecodeImage,
    Feed,
    FieldSpec,
    Index,
    Reader,
    build_index,
    pack,
)
from twinfeed.loaders.formats.example import encode
from twinfeed.loaders.formats.tar import TarWriter
from twinfeed.loaders.reading.prefetch.schedule import Request
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.samplers import ExactOnceBatchSampler

PIXELS = np.random.default_rng(0).integers(0, 256, (11, 7, 3), dtype=np.uint8)


def encoded(pixels: np.ndarray, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def batch(index: Index, decode: Any, n: int, **options: Any) -> dict[str, Any]:
    sampler = ExactOnceBatchSampler(n, batch_size=n)
    return batcher_of(Feed(index, sampler, decode=decode, **options))(Request.of(sampler, 0, 0))


# Images


@pytest.mark.parametrize("kind", ["png", "bmp", "webp"])
def test_lossless_images_round_trip(kind: str) -> None:
    options = {"lossless": True} if kind == "webp" else {}
    array = DecodeImage()({"image": encoded(PIXELS, kind, **options)})["image"]
    np.testing.assert_array_equal(array, PIXELS)
    assert array.dtype == np.uint8


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("source", [PIXELS, PIXELS[..., 0]], ids=["colour", "grey"])
def test_jpeg_equals_pillow_within_one_step(mode: str, source: np.ndarray) -> None:
    smooth = np.asarray(Image.fromarray(source).resize((64, 48)))
    data = encoded(smooth, "jpeg", quality=95)
    array = DecodeImage(mode=mode)({"image": data})["image"]
    other = np.asarray(Image.open(io.BytesIO(data)).convert(mode))
    assert array.shape == other.shape
    assert np.abs(array.astype(int) - other.astype(int)).max() <= 3


@pytest.mark.parametrize("kind", ["png", "jpeg"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_size_resizes_as_pillow_does(kind: str, mode: str) -> None:
    data = encoded(PIXELS, kind)
    array = DecodeImage(mode=mode, size=(5, 9))({"image": data})["image"]
    whole = Image.fromarray(DecodeImage(mode=mode)({"image": data})["image"])
    np.testing.assert_array_equal(array, whole.resize((9, 5), Image.Resampling.BILINEAR))


def test_decode_keeps_other_fields() -> None:
    data = encoded(PIXELS, "png")
    sample = DecodeImage("photo")({"photo": data, "name": b"cat"})
    assert list(sample) == ["photo", "name"]
    assert sample["name"] == b"cat"


def test_decoded_images_do_not_share_memory() -> None:
    for kind in ("png", "jpeg"):
        decode = DecodeImage(size=(4, 4))
        first = decode({"image": encoded(PIXELS, kind)})["image"].copy()
        kept = decode({"image": encoded(PIXELS, kind)})["image"]
        decode({"image": encoded(255 - PIXELS, kind)})
        np.testing.assert_array_equal(kept, first)


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> deque[np.ndarray]:
    """The memory that images have left, none at first; small images count as large."""
    memory: deque[np.ndarray] = deque(maxlen=8)
    monkeypatch.setattr("twinfeed.loaders.feed.decode._FREE_BLOCKS", memory)
    monkeypatch.setattr("twinfeed.loaders.feed.decode._MIN_POOLED", 1)
    return memory


@pytest.mark.parametrize("size", [None, (3, 3)])
def test_memory_of_huge_image_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, free_memory: deque[np.ndarray], size: Any
) -> None:
    """What is kept is for the images that come often."""
    monkeypatch.setattr("twinfeed.loaders.feed.decode._MAX_POOLED", PIXELS.size)
    twice = np.tile(PIXELS, (2, 2, 1))
    for pixels, kept in ((twice, []), (PIXELS, [PIXELS.size])):
        DecodeImage(size=size)({"image": encoded(pixels, "jpeg")})
        assert [len(memory) for memory in free_memory] == kept


def test_memory_is_reused_once_no_view_of_it_is_alive(free_memory: deque[np.ndarray]) -> None:
    def image(pixels: np.ndarray) -> np.ndarray:
        return DecodeImage()({"image": encoded(pixels, "jpeg")})["image"]

    first = image(PIXELS)
    place, expected = first.ctypes.data, first[2:, 3:].copy()
    crop = first.view()[2:, 3:]
    del first
    assert not free_memory
    other = image(255 - PIXELS)
    assert other.ctypes.data != place
    np.testing.assert_array_equal(crop, expected)
    del crop
    assert len(free_memory) == 1
    again = image(PIXELS[:9])
    assert again.ctypes.data == place
    assert again.flags.writeable
    np.testing.assert_array_equal(again[2:6], image(PIXELS[:9])[2:6])
    del again, other
    image(PIXELS[:3])
    assert len(free_memory[-1]) == PIXELS[:3].size  # the memory of the others was too large


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_image_of_exactly_max_pixels_is_decoded(kind: str) -> None:
    data = {"image": encoded(PIXELS, kind)}
    assert DecodeImage(max_pixels=77)(data)["image"].shape == PIXELS.shape


# What is refused


def claiming(kind: str, height: int, width: int) -> bytes:
    """An image whose header claims another size than its few bytes hold."""
    data = encoded(PIXELS, kind)
    if kind == "jpeg":
        size = data.index(b"\xff\xc0") + 5
        return data[:size] + struct.pack(">HH", height, width) + data[size + 4 :]
    header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


def tiff(mode: str) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (3, 2), 1).save(file, "tiff")
    return file.getvalue()


def decoded(data: bytes, name: str = "image", **options: Any) -> Call:
    return lambda _: DecodeImage(name, **options)({name: data})


def of_batch(*samples: Any, decode: Any = DecodeImage(), **options: Any) -> Call:  # noqa: B008
    """A batch of these images, or samples."""
    given = [one if isinstance(one, dict) else {"image": one} for one in samples]
    return lambda folder: batch(pack(given, folder)["data"], decode, len(given), **options)


def shaped(shape: tuple[int, ...], **options: Any) -> Call:
    spec = {"image": FieldSpec(shape, np.dtype(np.uint8))}
    return of_batch(JPEG, decode=DecodeImage(**options), spec=spec)


PNG, JPEG = encoded(PIXELS, "png"), encoded(PIXELS, "jpeg")
LARGE = encoded(np.asarray(Image.fromarray(PIXELS).resize((64, 64))), "jpeg")

REFUSED: Refused = [
    *(
        (of_batch(PNG, data), DecodeError, r"record 1 \(data.*number 1")
        for data in (b"", b"\xff\xd8 broken", b"\x89PNG broken", b"no image")
    ),
    (of_batch(LARGE[: len(LARGE) * 2 // 3]), DecodeError, "record 0"),  # not grey pixels
    (decoded(encoded(PIXELS, "eps")), UnidentifiedImageError, "is not an image"),  # by Ghostscript
    (
        of_batch({"cls": b"2"}, decode=DecodeImage("cls")),
        DecodeError,
        "'cls' is not an image.* b'2'",
    ),
    (
        decoded(b"", "x.png"),
        UnidentifiedImageError,
        r"'x.png' is not an image, it begins with b''$",
    ),
    *(
        (decoded(claiming(kind, 13000, 13000), size=size), ValueError, f"={LIMITS.pixels}")
        for kind in ("jpeg", "png")
        for size in (None, (4, 4))
    ),
    *((decoded(one, max_pixels=76), ValueError, "11 x 7 pixels, .*=76") for one in (JPEG, PNG)),
    (shaped(PIXELS.shape, max_pixels=76), DecodeError, "record 0 .*7 pixels, more than max_pixels"),
    *((decoded(tiff(mode)), ValueError, "pixels of 32 bits") for mode in "IF"),
    *(
        (shaped(shape), DecodeError, r"'image' has shape \(11, 7, 3\)")
        for shape in ((7, 11, 3), (11, 7, 1, 3), (11, 21), (231,))
    ),
    (
        of_batch(JPEG, encoded(PIXELS[:5], "jpeg")),
        ValueError,
        r"'image' has shape \(5, 7, 3\), but \(11, 7, 3\)",
    ),
    (
        lambda _: DecodeExample("data", features=("missing",))({"data": encode({"a": 1})}),
        KeyError,
        "missing",
    ),
    (lambda _: DecodeExample(features="ab"), TypeError, "features must be a list of names"),
    (lambda _: DecodeExample(lists="ab"), TypeError, "lists must be a list of names"),
    (
        lambda _: DecodeExample()({"data": encode({"x": 1}) + b"\x12\7\x0a\5\x0a\1x\x12\0"}),
        ValueError,
        "'x' is in the context and in the feature lists",
    ),
    (
        of_batch({"x": b"1"}, decode=lambda _: {"x": {"y": 1}}),
        ValueError,
        "record 0 .*'x' holds a dict, which.*array of numbers or a string",
    ),
]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("call", "kind", "word"), REFUSED)
def test_fault_64_decode_error_says_what_is_wrong(
    tmp_path: Path, call: Call, kind: type[Exception], word: str
) -> None:
    with pytest.raises(kind, match=word):
        call(tmp_path)


def test_pillow_decompression_bomb_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 30)
    with pytest.raises(Image.DecompressionBombError, match="MAX_IMAGE_PIXELS sets this limit"):
        DecodeImage(max_pixels=10**9)({"image": PNG})


def test_images_of_different_heights_are_ragged(tmp_path: Path) -> None:
    index = pack([{"image": one} for one in (JPEG, encoded(PIXELS[:5], "jpeg"))], tmp_path)["data"]
    assert batch(index, DecodeImage(), 2, collate="ragged")["image"].lengths.tolist() == [11, 5]


STAYS = """
import io, threading
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from twinfeed.loaders import DecodeImage

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmRSS"))

def decode():
    for size in (None, (8, 8)):
        array = DecodeImage(size=size)({"image": data})["image"]
        grown = resident() - before
    print(grown)

file = io.BytesIO()
Image.new("RGB", (7000, 7000)).save(file, KIND)
data = file.getvalue()
del file
before = resident()
thread = threading.Thread(target=decode)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells what is resident")
@pytest.mark.parametrize("kind", [pytest.param("jpeg", marks=pytest.mark.long), "png"])
def test_fault_64_memory_of_huge_image_is_returned(kind: str) -> None:
    """Also on a thread, for which the allocator would keep freed memory."""
    command = [sys.executable, "-c", f"KIND = {kind!r}\n{STAYS}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64  # MiB, of the 140 that the image has and the 190 that Pillow takes


# Into the batch's own memory


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("size", [None, (11, 7), (5, 9)])
@pytest.mark.parametrize("kinds", [("jpeg",), ("png",), ("jpeg", "png")])
def test_in_place_decoding_equals_plain_decoding(
    tmp_path: Path, mode: str, size: Any, kinds: Any
) -> None:
    images = [np.roll(PIXELS, number, 0) for number in range(6)]
    data = [encoded(image, kinds[n % len(kinds)]) for n, image in enumerate(images)]
    index = pack([{"image": one} for one in data], tmp_path)["data"]
    decode = DecodeImage(mode=mode, size=size)
    straight = batch(index, decode, 6)
    copied = batch(index, decode.__call__, 6)  # a plain callable
    np.testing.assert_array_equal(straight["image"], copied["image"])
    assert straight["image"].dtype == np.uint8
    assert straight["image"].flags.writeable
    one_by_one = [decode({"image": one})["image"] for one in data]
    np.testing.assert_array_equal(straight["image"], np.stack(one_by_one))


def test_subclass_is_called_as_any_other_decode(tmp_path: Path) -> None:
    index = pack([{"image": encoded(PIXELS, "jpeg")}] * 4, tmp_path)["data"]

    class Inverted(DecodeImage):
        def __call__(self, sample: Any, /) -> dict[str, Any]:
            return {"image": 255 - super().__call__(sample)["image"]}

    straight, inverted = batch(index, DecodeImage(), 4), batch(index, Inverted(), 4)
    np.testing.assert_array_equal(inverted["image"], 255 - straight["image"])


@pytest.mark.parametrize("decode", [DecodeImage(), DecodeImage().__call__])
def test_batch_is_written_into_memory_of_empty(tmp_path: Path, decode: Any) -> None:
    """By decoding in place, and by collating."""
    index = pack([{"image": encoded(PIXELS, "jpeg")}] * 2, tmp_path)["data"]
    sampler = ExactOnceBatchSampler(2, batch_size=2)
    made = []

    def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        made.append(np.empty(shape, dtype))
        return made[-1]

    feed = batcher_of(Feed(index, sampler, decode=decode), empty=empty)
    image = feed(Request.of(sampler, 0, 0))["image"]
    assert [one.__array_interface__["data"] for one in made] == [image.__array_interface__["data"]]


def test_batches_do_not_share_memory(tmp_path: Path) -> None:
    index = pack([{"image": encoded(PIXELS, "jpeg")}] * 4, tmp_path)["data"]
    sampler = ExactOnceBatchSampler(4, batch_size=2)
    feed = batcher_of(Feed(index, sampler, decode=DecodeImage()))
    first, second = (feed(Request.of(sampler, 0, step))["image"] for step in range(2))
    second[:] = 0
    assert first.any()


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_image_is_cast_to_the_dtype_of_spec(tmp_path: Path, kind: str) -> None:
    index = pack([{"image": encoded(PIXELS, kind)}] * 2, tmp_path)["data"]
    sampler = ExactOnceBatchSampler(2, batch_size=2)
    spec = {"image": FieldSpec(PIXELS.shape, np.dtype(np.float32))}
    request = Request.of(sampler, 0, 0)
    image = batcher_of(Feed(index, sampler, decode=DecodeImage(), spec=spec))(request)["image"]
    assert image.dtype == np.float32
    np.testing.assert_array_equal(
        image, batcher_of(Feed(index, sampler, decode=DecodeImage()))(request)["image"]
    )


def test_repeated_record_and_padding_are_copied(tmp_path: Path) -> None:
    data = [encoded(np.roll(PIXELS, n, 0), "png") for n in range(3)]
    index = pack([{"image": one} for one in data], tmp_path)["data"]
    sampler = ExactOnceBatchSampler(3, batch_size=4, last_batch="pad")
    feed = batcher_of(Feed(index, sampler, decode=DecodeImage()))
    padded = feed(Request.of(sampler, 0, 0))["image"]
    assert not padded[3].any()
    np.testing.assert_array_equal(padded[2], np.roll(PIXELS, 2, 0))
    request = Request.of(sampler, 0, 0)
    twice = np.array([2, 0, 2, 1])
    got = feed(request._replace(ids=twice, records=twice, mask=None))["image"]
    for place, record in enumerate(twice):
        np.testing.assert_array_equal(got[place], np.roll(PIXELS, record, 0))


# Examples


@pytest.mark.frameworks
def test_steps_of_a_feature_list_have_one_kind() -> None:
    """As TensorFlow asks for: numpy would round, or make text of numbers."""
    import tensorflow as tf

    steps = [
        tf.train.Feature(int64_list=tf.train.Int64List(value=[2**53 + 1])),
        tf.train.Feature(float_list=tf.train.FloatList(value=[0.5])),
    ]
    lists = tf.train.FeatureLists(feature_list={"x": tf.train.FeatureList(feature=steps)})
    data = tf.train.SequenceExample(feature_lists=lists).SerializeToString()
    with pytest.raises(ValueError, match="a feature list has float32 and int64 in its steps"):
        DecodeExample()({"data": data})


def test_raw_example_is_decoded_into_its_features() -> None:
    data = encode({"a": 1, "b": [1, 2], "c": [0.5], "d": [b"x", b"y"], "e": b"z"})
    sample = DecodeExample("data")({"data": data, "kept": 3})
    assert {name: np.asarray(value).tolist() for name, value in sample.items()} == {
        "kept": 3, "a": 1, "b": [1, 2], "c": 0.5, "d": [b"x", b"y"], "e": b"z",
    }  # fmt: skip
    assert DecodeExample(lists=("name",))({"data": encode({"name": b"cat", "n": 1})}) == {
        "name": [b"cat"],
        "n": 1,
    }
    assert list(DecodeExample("data", features=("e", "a"))({"data": data})) == ["e", "a"]


# Webdataset


def test_webdataset_tar_is_decoded_into_batches(tmp_path: Path) -> None:
    with TarWriter(tmp_path / "a.tar") as tar:
        for number in range(3):
            meta = json.dumps({"box": [number, 1]}).encode()
            parts = {"png": encoded(PIXELS, "png"), "cls": b"%d" % number, "json": meta}
            tar.write(f"{number:03}", parts)
    index = build_index(tmp_path / "a.tar", tmp_path / "a.index")

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        box = json.loads(sample["json"])["box"]
        return {"png": DecodeImage("png")(sample)["png"], "cls": int(sample["cls"]), "box": box}

    got = batch(index, decode, 3)
    assert got["png"].shape == (3, *PIXELS.shape)
    assert got["cls"].tolist() == [0, 1, 2]
    assert got["box"].tolist() == [[0, 1], [1, 1], [2, 1]]


def test_crop_keeps_aspect_and_cuts_both_sides() -> None:
    """Where no pixel needs another size, the result is the middle of the image."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 12, 3), np.uint8)
    for array in (pixels, pixels.transpose(1, 0, 2)):
        cropped = DecodeImage(size=[6, 6], fit="crop")({"image": encoded(array, "png")})["image"]
        top, left = (array.shape[0] - 6) // 2, (array.shape[1] - 6) // 2
        assert np.array_equal(cropped, array[top : top + 6, left : left + 6])


def test_pad_keeps_the_whole_image_and_puts_zeros_on_both_sides() -> None:
    pixels = np.random.default_rng(0).integers(1, 256, (4, 8, 3), np.uint8)
    for array in (pixels, pixels.transpose(1, 0, 2)):
        padded = DecodeImage(size=(8, 8), fit="pad")({"image": encoded(array, "png")})["image"]
        top, left = (8 - array.shape[0]) // 2, (8 - array.shape[1]) // 2
        inside = padded[top : top + array.shape[0], left : left + array.shape[1]]
        assert np.array_equal(inside, array)
        assert padded.astype(int).sum() == inside.astype(int).sum()


@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    size=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    fit=st.sampled_from(["stretch", "crop", "pad"]),
    mode=st.sampled_from(["RGB", "L"]),
)
def test_every_fit_returns_the_requested_size(
    height: int, width: int, size: tuple[int, int], fit: Any, mode: Any
) -> None:
    """Nothing is black where the image is white, but for padding."""
    white = encoded(np.full((height, width, 3), 255, np.uint8), "png")
    found = DecodeImage(size=size, fit=fit, mode=mode)({"image": white})["image"]
    assert found.shape == (*size, 3)[: 3 if mode == "RGB" else 2]
    inside = found[found > 0]
    assert (inside == 255).all()
    assert len(inside) == found.size or fit == "pad"


@pytest.mark.parametrize(
    ("size", "fit", "gap", "part", "checksum"),
    [
        ((40, 60), "stretch", None, 1, 0xF19D8ECF),
        ((40, 60), "stretch", 2.0, 2, 0x4672E1DC),
        ((20, 20), "stretch", 2.0, 4, 0xB2B541B2),
        ((20, 20), "crop", 2.0, 4, 0x65872E9F),
        ((20, 20), "pad", 2.0, 4, 0x58626B0C),
        ((10, 10), "stretch", 2.0, 8, 0x0CC89405),
        ((96, 128), "stretch", 1, 2, 0x4F322DF9),
    ],
)
def test_reducing_gap_decodes_at_reduced_size(
    size: tuple[int, int], fit: Any, gap: float | None, part: int, checksum: int
) -> None:
    """The pixels are golden, and nearly those of the whole image."""
    photo = {"image": (GOLDEN / "photo.jpg").read_bytes()}
    decode = DecodeImage(size=size, fit=fit, reducing_gap=gap)
    found = decode(photo)["image"]
    assert decode._divisor(192, 256) == part
    assert zlib.crc32(found.tobytes()) == checksum
    whole = DecodeImage(size=size, fit=fit)(photo)["image"]
    assert np.abs(whole.astype(int) - found).mean() < 1


@given(
    height=st.integers(1, 300),
    width=st.integers(1, 300),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    fit=st.sampled_from(["stretch", "crop", "pad"]),
    gap=st.floats(1, 4),
)
def test_reducing_gap_chooses_largest_sufficient_reduction(
    height: int, width: int, size: tuple[int, int], fit: Any, gap: float
) -> None:
    """No part is smaller than `gap` times its resized size, and no larger part would do."""
    decode = DecodeImage(size=size, fit=fit, reducing_gap=gap)
    high, wide = size[0] / height, size[1] / width
    if fit != "stretch":
        high = wide = max(high, wide) if fit == "crop" else min(high, wide)
    part = decode._divisor(height, width)
    enough = [n for n in (1, 2, 4, 8) if n == 1 or gap * n * max(high, wide) <= 1]
    assert part == max(enough)
    jpeg = encoded(np.full((height, width, 3), 255, np.uint8), "jpeg")
    assert decode({"image": jpeg})["image"].shape == (*size, 3)


def test_padded_jpeg_in_batch_equals_single_decode(tmp_path: Path) -> None:
    """What is decoded into the batch's own rows is what a single call gives."""
    arrays = [
        np.random.default_rng(n).integers(0, 256, (8, 4 + 4 * n, 3), np.uint8) for n in (0, 1, 2)
    ]
    images = [encoded(array, "jpeg") for array in arrays]
    index = pack([{"image": image} for image in images], tmp_path)["data"]
    decode = DecodeImage(size=(8, 8), fit="pad")
    got = batch(index, decode, 3)["image"]
    assert [row.tolist() for row in got] == [
        decode({"image": image})["image"].tolist() for image in images
    ]


@pytest.mark.frameworks
def test_sequence_example_equals_tensorflow(tmp_path: Path) -> None:
    """Its context as an Example, and its lists step by step."""
    import tensorflow as tf

    def feature(value: Any) -> Any:
        if isinstance(value[0], bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=value))
        if isinstance(value[0], int):
            return tf.train.Feature(int64_list=tf.train.Int64List(value=value))
        return tf.train.Feature(float_list=tf.train.FloatList(value=value))

    lists: dict[str, list[Any]] = {
        "frames": [[b"a"], [b"b"], [b"c"]],
        "rgb": [[0.5, 0.25]] * 3,
        "times": [[1], [2], [-3]],
        "boxes": [[1.0], [2.0, 3.0], [4.0]],
        "once": [[7]],
    }
    message = tf.train.SequenceExample(
        context=tf.train.Features(feature={"video": feature([b"v"]), "label": feature([4])}),
        feature_lists=tf.train.FeatureLists(
            feature_list={
                name: tf.train.FeatureList(feature=map(feature, steps))
                for name, steps in lists.items()
            }
        ),
    )
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        writer.write(message.SerializeToString())
    with pytest.raises(ValueError, match="use example=False and DecodeExample"):
        build_index(tmp_path / "a.tfrecord", tmp_path / "a.index")
    index = build_index(tmp_path / "a.tfrecord", tmp_path / "a.index", example=False)
    with Reader(index) as reader:
        (data,) = reader.read([0])["data"]
    found = DecodeExample()({"data": data})
    assert (found["video"], found["label"]) == (b"v", 4)
    assert found["frames"] == [b"a", b"b", b"c"]
    assert found["rgb"].tolist() == [[0.5, 0.25]] * 3
    assert found["times"].tolist() == [1, 2, -3]
    assert [step.tolist() for step in found["boxes"]] == lists["boxes"]
    assert found["once"].tolist() == [7]
    assert list(DecodeExample(features=("times",))({"data": data})) == ["times"]
    with pytest.raises(DataCorruptionError):
        DecodeExample()({"data": data[:-3]})
