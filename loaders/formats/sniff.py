"""Identify a file that is not a shard by its first bytes, for the advice in an error.

It is used only after the format's own check has failed. So no valid shard is ever refused for its
first bytes.
"""

from __future__ import annotations

import bz2
import itertools
import lzma
import os
import re
import zlib
from codecs import getincrementaldecoder
from collections.abc import Callable
from functools import partial
from typing import Any

from twinfeed.loaders.formats._tarnumbers import octal, sum_of_bytes
from twinfeed.loaders.support.checksum import masked_crc32c
from twinfeed.loaders.support.limits import LIMITS

_gzip = partial(zlib.decompressobj, wbits=16 + zlib.MAX_WBITS)
_xz = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=LIMITS.record_bytes)

COMPRESSED: dict[str, tuple[bytes, Callable[[], Any]]] = {
    "gzip": (rb"\x1f\x8b", _gzip),
    "bzip2": (rb"BZh", bz2.BZ2Decompressor),
    "xz": (rb"\xfd7zXZ\x00", _xz),
    "zlib": (rb"\x78[\x01\x5e\x9c\xda]", zlib.decompressobj),
}
"""The kinds of compression: how files begin, and what makes the decompressor of a stream.
TensorFlow writes zlib where it is asked for ZLIB.
"""

SNIFF_BYTES = 512
"""The number of bytes at the start of a file that are examined: the size of a tar header."""

IMAGES = {
    "JPEG": (("jpg", "jpeg"), rb"\xff\xd8\xff"),
    "PNG": (("png",), rb"\x89PNG\r\n\x1a\n"),
    "WebP": (("webp",), rb"RIFF....WEBP"),
    "BMP": (("bmp",), rb"BM.{4}\x00{4}"),
    "GIF": (("gif",), rb"GIF8[79]a"),
    "TIFF": (("tif", "tiff"), rb"II\*\x00|MM\x00\*"),
    "PPM": (("ppm", "pgm", "pbm"), rb"(?!)"),  # too much like a text file to be recognized
}
"""The formats of images, by Pillow's names in any case: their extensions, and how the files begin.
None runs a program, as EPS does."""

IMAGE_EXTENSIONS = tuple(itertools.chain.from_iterable(names for names, _ in IMAGES.values()))


def has_image_extension(path: object, /) -> bool:
    """Return whether a value is the path of an image, by its extension."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    return os.path.splitext(str(path))[1][1:].lower() in IMAGE_EXTENSIONS


_LEADING_SPACE = rb"[\xef\xbb\xbf \t\r\n]*"
_HTML = rb"(?i:<!doctype html|<html|<head|<body)"
_SIGNATURES = {
    "fetch the data with: git lfs pull": [
        ("a Git LFS pointer, not the data", rb"version https://git-lfs"),
    ],
    "decompress the shard with zstd -d, and index the result": [
        ("zstd-compressed", rb"\x28\xb5\x2f\xfd"),
    ],
    "download the shard again and look at its URL": [
        ("an HTML page, probably of an error", _LEADING_SPACE + _HTML),
        ("an XML page, probably of an error", _LEADING_SPACE + rb"(?i:<\?xml|<error)"),
    ],
    "loose images are indexed as they are: give the folder that holds them": [
        (f"a {name} image", magic) for name, (_, magic) in IMAGES.items()
    ],
    "write its records to shards with loaders.pack, which takes any iterable of dicts": [
        ("a Parquet file", rb"PAR1"),
        ("a zip archive (.zip or .npz)", rb"PK\x03\x04"),
    ],
}
"""For each advice, the kinds of files that it is for, with the bytes that they begin with."""

_TEXT_ADVICE = "give the shards themselves, not a list of them; lines of text are packed first"
_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")


def image_extension(head: bytes, /) -> str | None:
    """Return the extension for an image with these first bytes; None if it is not an image."""
    matches = (names[0] for names, magic in IMAGES.values() if re.match(magic, head, re.DOTALL))
    return next(matches, None)


def compression(head: bytes, /) -> str | None:
    """Return the kind of compression by the first bytes of a file; None if it is not compressed."""
    # A TFRecord may begin with any length, and so with the two bytes of zlib.
    if is_tar(head) or is_tfrecord(head):
        return None
    return next((kind for kind, (magic, _) in COMPRESSED.items() if re.match(magic, head)), None)


def is_tar(head: bytes, /) -> bool:
    """Return whether the first bytes of a file are a tar header.

    A tar header has the magic bytes "ustar" at offset 257. The oldest format (V7) has no magic
    bytes, and is recognized by a correct checksum, the number in bytes 148 to 155.
    """
    is_whole = len(head) >= SNIFF_BYTES  # a header of 512 bytes, which has a checksum
    return head[257:262] == b"ustar" or (is_whole and octal(head[148:156]) == sum_of_bytes(head))


def identify(head: bytes, /) -> tuple[str, str] | None:
    """Return (what the file is, advice) by its first bytes; None for an unknown kind."""
    if is_tar(head):
        return "a tar archive", "index it with container='tar'"
    if is_tfrecord(head):
        return "a TFRecord file", "index it with container='tfrecord'"
    if kind := compression(head):
        advice = "convert it with twinfeed pack SHARD FOLDER"
        return f"{kind}-compressed", f"a compressed shard has no random access: {advice}"
    for advice, kinds in _SIGNATURES.items():
        for kind, magic in kinds:
            if re.match(magic, head, re.DOTALL):
                return kind, advice
    return ("a text file", _TEXT_ADVICE) if _is_text(head) else None


def is_tfrecord(head: bytes, /) -> bool:
    """Return whether the first bytes are a length and its checksum."""
    return len(head) >= 12 and masked_crc32c(head[:8]) == int.from_bytes(head[8:12], "little")


def _is_text(head: bytes) -> bool:
    """Return whether the bytes are UTF-8 text. A short file must also contain a newline."""
    if len(head) < SNIFF_BYTES and b"\n" not in head:
        return False  # it may be a tar archive that ends within its first name
    try:
        return not _CONTROL_CHARACTER.search(getincrementaldecoder("utf-8")().decode(head))
    except UnicodeDecodeError:
        return False
