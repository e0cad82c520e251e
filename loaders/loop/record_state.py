"""What a state says of the records of a source, so that a state of other records is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinfeed.loaders.reading.source import Source
from twinfeed.samplers import StateMismatchError


def record_state(source: Source, /) -> dict[str, Any]:
    """Return the number of records, and the digests of fields and of columns by name.

    A name may be a field in one container and a column in another: a tar holds numbers as text. A
    field and a column are not compared.
    """
    digests: dict[str, dict[str, str]] = {"fields": {}, "columns": {}}
    for name, digest in source.digests.items():
        digests["columns" if name in source.columns else "fields"][name] = digest
    return {"count": len(source), **digests}


def check_records(saved: object, current: Mapping[str, Any], where: object, /) -> bool:
    """Compare the digests of the records of a saved state with the current ones.

    Args:
        saved: the `record_state` of a saved state, or anything else that a user loads.
        current: the `record_state` of the loader's source.
        where: the source, for the message.

    Returns:
        Whether any field or column has a digest in both, so that something was compared.

    Raises:
        StateMismatchError: the digests of a field or column differ.
    """
    compared = False
    for kind in ("fields", "columns"):
        digests = current[kind]
        saved_digests = saved.get(kind) if isinstance(saved, Mapping) else None
        saved_digests = saved_digests if isinstance(saved_digests, Mapping) else {}
        for name in sorted(digests.keys() & saved_digests):
            compared = True
            if digests[name] != saved_digests[name]:
                raise StateMismatchError(
                    f"the state is of other records: {name!r} has the digest "
                    f"{saved_digests[name]!r} in the state, {digests[name]!r} in {where!r}"
                )
    return compared
