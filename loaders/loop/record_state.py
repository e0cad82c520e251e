"""The part of a loader's state that identifies the records, so that other records are refused."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from twinfeed.loaders.index import Index
from twinfeed.loaders.reading.source import Source
from twinfeed.samplers import StateMismatchError


def record_state(source: Source, /) -> dict[str, Any]:
    """Return the part of a loader's state that identifies the records of a source.

    It has the number of records, and a digest (a hash of all values) for each field, whose values
    are stored in the shards, and for each column, whose values are an array of the index.

    The digests of fields, of columns and of lists are apart, since a state may be loaded for the
    same records in another container. For example, the number 7 may be the text b"7" in a field of
    a tar, but an integer in a column of an index of TFRecords. Their digests differ, and must not
    be compared.
    """
    digests: dict[str, dict[str, str]] = {"fields": {}, "columns": {}}
    stored = source.fields if isinstance(source, Index) else {}
    for name, digest in source.digests.items():
        is_list = name in stored and stored[name].kind != "bytes"
        kind = "columns" if name in source.columns else "lists" if is_list else "fields"
        digests.setdefault(kind, {})[name] = digest
    return {"count": len(source), **digests}


def check_records(saved: object, current: Mapping[str, Any], where: object, /) -> None:
    """Compare the digests of the records in a saved state with those of the loader's source.

    Warns if no field or column has a digest in both, so that nothing was compared.

    Args:
        saved: the `record_state` of a saved state, or anything else that a user loads.
        current: the `record_state` of the loader's source.
        where: the source, for the message.

    Raises:
        StateMismatchError: the digests of a field or column differ.
    """
    compared = False
    for kind in ("fields", "columns", "lists"):
        digests = current.get(kind, {})
        saved_digests = saved.get(kind) if isinstance(saved, Mapping) else None
        saved_digests = saved_digests if isinstance(saved_digests, Mapping) else {}
        for name in sorted(digests.keys() & saved_digests):
            compared = True
            if digests[name] != saved_digests[name]:
                how = ", or lists that are encoded otherwise" if kind == "lists" else ""
                raise StateMismatchError(
                    f"the state was saved with other records{how}: {name!r} has the digest "
                    f"{saved_digests[name]!r} in the state, and {digests[name]!r} in {where!r}"
                )
    if not compared:
        warnings.warn(
            "the state and the source share no digest: only the number of records was compared",
            stacklevel=4,
        )
