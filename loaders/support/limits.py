"""Limits of sizes, checked before any memory or time is spent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest sizes and counts that the loaders accept; `LIMITS` has the limits in force.

    No honest data comes near these limits, which keep a hostile shard or index from costing more
    than its own size. Each limit is checked where the number first appears.

    Attributes:
        record_bytes: bytes of one record. `max_record_bytes=` sets another limit.
        batch_bytes: bytes that one `Reader.read` fetches.
        name_bytes: bytes of the name of a field or of a tar member.
        fields: different fields of all shards of an index together.
        values: values of one list of an Example that are stored one by one.
        header_bytes: bytes of all extended headers before one member of a tar.
        manifest_bytes: bytes of the manifest of an index.
        arrays: arrays of an index.
        features: features of one Example.
        table_bytes: bytes of a table of labels, of a list of bad records or of classes.
        pixels: pixels of one image. `DecodeImage(max_pixels=…)` sets another limit.
        inflation: bytes of a decompressed shard for each byte of the compressed shard; a shard may
            always have `record_bytes`.
        download_bytes: bytes of a shard of a store, which is copied here to be indexed or verified.

    >>> LIMITS.fields
    256
    """

    record_bytes: int = 1 << 30
    batch_bytes: int = 1 << 34
    name_bytes: int = 1 << 12
    fields: int = 256
    values: int = 1 << 20
    header_bytes: int = 1 << 20
    manifest_bytes: int = 1 << 23
    arrays: int = 1 << 10
    features: int = 1 << 14
    table_bytes: int = 1 << 32
    pixels: int = 1 << 27
    inflation: int = 1 << 10
    download_bytes: int = 1 << 38


LIMITS = Limits()
"""The limits in force."""
