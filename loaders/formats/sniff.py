"""Tell what a file is that was taken for a shard and is none.

Asked only after the format's own check has failed, so that no valid shard is ever refused by its
first bytes.
"""

from __future__ import annotations

_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"\x78\x01": "zlib",
    b"\x78\x5e": "zlib",
    b"\x78\x9c": "zlib",
    b"\x78\xda": "zlib",
}
COMPRESSED_ADVICE = (
    "a compressed shard has no random access: decompress it, or pack it again, and index the result"
)


def disguise(head: bytes, /) -> tuple[str, str] | None:
    """Return (what it is, what to do) for the first bytes of what is no shard; None if unknown.

    >>> disguise(b"version https://git-lfs.github.com/spec/v1")
    ('a Git LFS pointer, not the data', 'fetch the data with: git lfs pull')
    >>> disguise(b"plain") is None
    True
    """
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            return f"{name}-compressed", COMPRESSED_ADVICE
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the data", "fetch the data with: git lfs pull"
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:64].lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "an HTML page, probably of an error", "download the shard again and look at its URL"
    if start.startswith((b"<?xml", b"<error")):
        return "an XML page, probably of an error", "download the shard again and look at its URL"
    return None
