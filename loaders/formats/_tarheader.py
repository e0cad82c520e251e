"""Read the headers of a tar archive strictly: ustar, GNU and PAX.

Some archives are read differently by different programs (CVE-2025-62518, CVE-2019-20907,
CVE-2025-8194). Here an ambiguous form is an error: malformed PAX records, two extended headers of a
kind before one member, a PAX path that contradicts a GNU long name, negative sizes. A PAX size says
where the next header is. A PAX header never applies to a GNU header that follows.
Formats: POSIX.1-2017 "pax", and GNU tar's manual, "Basic Tar Format".
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

from twinfeed.loaders.errors import DataCorruptionError, ShardWarning, TruncatedShardError
from twinfeed.loaders.formats._tarnumbers import octal, sum_of_bytes
from twinfeed.loaders.formats.sniff import identify, is_tar
from twinfeed.loaders.support.limits import LIMITS

BLOCK = 512
REGULAR = (b"\x00", b"0", b"7")
LINKS = (b"1", b"2")
_DATALESS = (b"1", b"2", b"3", b"4", b"5", b"6")  # kinds without data, whatever the size field says
_UNSUPPORTED = {
    b"S": "a sparse member",
    b"M": "a member continued from another volume",
    b"N": "an old GNU long-name table",
}
_PAX_KEYS, _SPARSE = (b"path", b"linkpath", b"size"), b"GNU.sparse."
_PAX_LENGTH = re.compile(rb"([1-9][0-9]{0,9}) ")


class Member(NamedTuple):
    """A member: its name, type flag and link target, and where its headers and its data are.

    The header blocks `header` begin at byte `start`, and the `size` bytes of data at `offset`.
    """

    name: bytes
    kind: bytes
    start: int
    offset: int
    size: int
    link: bytes
    header: bytes

    @property
    def end(self) -> int:
        """The offset of the next header."""
        return self.offset + padded_size(self.size)


class HeaderReader:
    """Read the headers of an archive one by one, from a seekable file; errors name `path`."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self.file = file
        self.path = path
        self.size = file.seek(0, os.SEEK_END)
        self.position = 0

    def members(self) -> Iterator[Member]:
        """Yield every member, links and directories too; warn if the zero blocks at the end are
        missing.
        """
        while (member := self.next_member()) is not None:
            self.position = member.end
            yield member

    def next_member(self) -> Member | None:
        """Read the extended headers and the header of the next member; None at the end."""
        start, extended = self.position, b""
        headers: dict[bytes, Any] = {}  # the contents of the extended headers, by kind
        while (block := self._read_block()) is not None:
            kind, size = block[156:157], self._parse_size(block[124:136])
            self.position += BLOCK
            if kind not in b"xXgLK":
                return self._build_member(start, block, size, extended, headers)
            data = self._read_payload(size)
            extended += block + data
            if len(extended) > 2 * LIMITS.header_bytes:
                raise self._error(f"extended headers of more than {2 * LIMITS.header_bytes} bytes")
            self._add_extended(headers, kind, data[:size])
        if headers:
            raise self._truncated("an extended header, and no member after it", BLOCK)
        self._check_end()
        return None

    def _read_block(self) -> bytes | None:
        """Return the header block at `position`, with its checksum verified; None at the end."""
        self.file.seek(self.position)
        block = self.file.read(BLOCK)
        if not block.strip(b"\x00"):  # only zeros, or no bytes at all
            return None
        if len(block) < BLOCK:
            # `_not_tar_error` returns None unless the file is of another known format.
            raise self._not_tar_error(block) or self._truncated("a header", BLOCK)
        stored, total = octal(block[148:156]), sum_of_bytes(block)
        if stored != total:
            raise self._not_tar_error(block) or self._error(
                f"bad header checksum at offset {self.position}", expected=stored, found=total
            )
        return block

    def _parse_size(self, field: bytes) -> int:
        """Return the number in the size field of a header, octal text; refuse a binary number."""
        value = octal(field)
        if value is None:
            # With this bit, a number is in base 256, as GNU tar writes sizes from 8 GiB on.
            advice = "write the archive again: tar --format=pax" if field[0] & 128 else None
            problem = f"size that is not an octal number at offset {self.position}"
            raise self._error(problem, found=field, advice=advice)
        return value

    def _read_payload(self, size: int) -> bytes:
        """Return the data of an extended header, with padding; raise an error for a wrong size."""
        if not 0 < size <= LIMITS.header_bytes:
            raise self._error(
                f"extended header at offset {self.position - BLOCK} of {size} bytes",
                expected=f"1 to {LIMITS.header_bytes} bytes",
                found=f"{size} bytes",
            )
        if self.position + padded_size(size) > self.size:
            raise self._truncated("an extended header", size)
        data = self.file.read(padded_size(size))
        self.position += len(data)
        return data

    def _add_extended(self, headers: dict[bytes, Any], kind: bytes, data: bytes) -> None:
        """Add the contents of an extended header to `headers`, by its kind.

        The kind is tar's type flag: "x" is a PAX header for the next member (also written "X"), "g"
        a PAX header for all later members, "L" a long name and "K" a long link target of GNU tar.
        """
        if kind == b"g":  # as of git archive, with a comment
            if records := self._parse_pax(data):
                raise self._error(f"a global PAX header may not have {[*records]}")
            return
        is_gnu = kind in b"LK"
        if kind == b"X":
            kind = b"x"
        if kind in headers:
            names = "GNU long names" if is_gnu else "PAX headers"
            raise self._error(f"two {names} before one member")
        headers[kind] = data.rstrip(b"\x00") if is_gnu else self._parse_pax(data)

    def _parse_pax(self, data: bytes) -> dict[bytes, bytes]:
        """Return the PAX records with a key that matters here: path, link path, size, sparse.

        A record is `length key=value` and a newline.
        """
        records, position = dict[bytes, bytes](), 0
        while position < len(data):
            match = _PAX_LENGTH.match(data, position)
            start = end = position
            if match:
                start, end = match.end(), position + int(match[1])
            key, equals, value = data[start : end - 1].partition(b"=")
            if end > len(data) or not key or not equals or data[end - 1 : end] != b"\n":
                raise self._error("malformed PAX record", found=data[position : position + 40])
            if key in _PAX_KEYS or key.startswith(_SPARSE):
                records[key] = value
            position = end
        return records

    def _build_member(
        self, start: int, plain: bytes, size: int, extended: bytes, headers: Mapping[bytes, Any]
    ) -> Member:
        """Return the member whose headers begin at offset `start` of the archive.

        `plain` is its header block, `size` the size in it, and `headers` the extended ones, which
        come first.
        """
        # The fields of a plain header, by offset: name 0, type flag 156, link target 157, magic
        # 257, and 345 the first part of a name that is longer than 100 bytes.
        kind, name, link = plain[156:157], _text(plain[:100]), _text(plain[157:257])
        name_prefix = _text(plain[345:500])
        if kind in _UNSUPPORTED:
            raise self._unsupported_error(kind, start)
        if name_prefix and plain[257:263] == b"ustar\x00":
            name = name_prefix + b"/" + name
        if headers:
            pax = headers.get(b"x", {})
            if any(key.startswith(_SPARSE) for key in pax):
                raise self._unsupported_error(b"S", start)
            name = self._full_name(name, headers.get(b"L"), pax.get(b"path"))
            link = self._full_name(link, headers.get(b"K"), pax.get(b"linkpath"))
            if length := pax.get(b"size"):
                if not length.isdigit() or len(length) > 19:
                    raise self._error("PAX size that is not a number", found=length)
                size = int(length)
        longest = max(len(name), len(link))
        if longest > LIMITS.name_bytes:
            problem = f"name longer than {LIMITS.name_bytes} bytes"
            raise self._error(problem, found=f"{longest} bytes")
        if kind in _DATALESS:
            size = 0
        if self.position + padded_size(size) > self.size:
            raise self._truncated(f"member {name!r}", size, at=start)
        return Member(name, kind, start, self.position, size, link, extended + plain)

    def _full_name(self, short: bytes, gnu: bytes | None, pax: bytes | None) -> bytes:
        """Return the PAX or GNU name (if both exist, they must be equal), else the short name."""
        if gnu is not None and pax and gnu != pax:
            raise self._error("PAX and GNU names differ", expected=gnu, found=pax)
        return pax or gnu or short

    def _check_end(self) -> None:
        """Check the end of the archive: raise an error for bytes after it; warn if it is missing.

        The end is two blocks of zeros. Bytes follow it for example if two archives were joined with
        `cat`: tar does not read the second one.
        """
        if self.size < self.position + 2 * BLOCK:
            self.warn("the archive does not end with two zero blocks; its members are complete")
        self.file.seek(self.position)
        end = offset = self.position
        while data := self.file.read(1 << 20):
            if data.strip(b"\x00"):
                offset += len(data) - len(data.lstrip(b"\x00"))
                problem = f"archive ends at offset {end}, more data begin at offset {offset}"
                advice = "restore the shard, or join archives with tar --concatenate"
                raise self._error(problem, at=offset, advice=advice)
            offset += len(data)

    def warn(self, problem: str) -> None:
        """Emit a ShardWarning that names the archive."""
        warnings.warn(f"{self.path}: {problem}", ShardWarning, stacklevel=2)

    def _not_tar_error(self, block: bytes) -> DataCorruptionError | None:
        """Return the error for a file that starts like a file of another format; else None."""
        found = identify(block) if self.position == 0 and not is_tar(block) else None
        return found and self._error(f"not a tar archive: {found[0]}", advice=found[1])

    def _unsupported_error(self, kind: bytes, start: int) -> DataCorruptionError:
        """Return the error for a valid member whose data are not one range of bytes."""
        advice = "write the archive again with a newer tar, without --sparse and --multi-volume"
        return self._error(f"{_UNSUPPORTED[kind]} is not supported", at=start, advice=advice)

    def _truncated(self, part: str, size: int, *, at: int | None = None) -> DataCorruptionError:
        """Return the error for an archive that ends within a part of `size` bytes."""
        padded = padded_size(size)
        return TruncatedShardError(
            f"the archive ends within {part}",
            path=self.path,
            offset=self.position if at is None else at,
            expected=f"{size} bytes" + (f", padded to {padded}" if padded > size else ""),
            found=f"{max(self.size - self.position, 0)} bytes",
        )

    def _error(self, problem: str, *, at: int | None = None, **details: Any) -> DataCorruptionError:
        """Return an error at the current position in the archive, or at offset `at`."""
        offset = self.position if at is None else at
        return DataCorruptionError(problem, path=self.path, offset=offset, **details)


def _text(field: bytes) -> bytes:
    """Return a text field up to its first NUL."""
    return field.partition(b"\x00")[0]


def padded_size(size: int) -> int:
    """Return a size in bytes, rounded up to a multiple of the block size."""
    return -(-size // BLOCK) * BLOCK
