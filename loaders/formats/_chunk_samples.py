"""Find the samples of a tar archive at once, if their headers are plain and their fields the same.

A plain header is that of a regular file, and has its whole name, in ASCII. All other headers are
read one by one, by _tarheader.py.
"""

from __future__ import annotations

import re
from itertools import product

import numpy as np

from twinfeed.loaders.formats._tarheader import BLOCK, padded_size
from twinfeed.loaders.formats.records import FieldRanges, RecordChunk, slices
from twinfeed.loaders.support.checksum import crc32c_of_each

_PLAIN_HEADER = re.compile(
    rb"(?!__|\._|[^\0]*/(?:\._|__MACOSX/))"  # not the name of metadata, or of a file of macOS
    rb"(?=[^\0]{1,99}\0)"
    rb"(?=((?:[ -~]*/)?[ -\-0-~]+)[.]([ -.0-~]*)\0)"  # the key and the extension
    rb".{124}([0-7]{11})[ \0].{12}([0-7]{6})\0 0.{188}\0.{166}",  # the size and the checksum
    re.DOTALL,
)


def chunk_samples(data: bytes, offset: int, first: int, max_bytes: int, /) -> RecordChunk | None:
    """Return the samples in `data` but the last, whose members may continue after `data`.

    `data` has the bytes of an archive from `offset` on, where the sample with index `first`
    begins. None if a sample is bad, is longer than `max_bytes`, or has other fields than the first.
    """
    names, members, end = list[tuple[bytes, bytes]](), list[tuple[int, int, int, int]](), 0
    while header := _PLAIN_HEADER.match(data, end):
        start, size = end, int(header[3], 8)
        end += BLOCK + padded_size(size)
        if end > len(data):
            break
        names.append((header[1], header[2].lower()))
        members.append((start, start + BLOCK + size, end, int(header[4], 8)))
    # The members of one sample: those before the first other key. All samples have as many.
    width = next((n for n, (key, _) in enumerate(names) if key != names[0][0]), len(names) + 1)
    num_samples = (len(names) - 1) // width
    count = num_samples * width
    keys = [key for key, _ in names[: count + 1 : width]]  # with the key after these samples
    extensions = [extension for _, extension in names[:width]]
    is_regular = names[:count] == [*product(keys[:num_samples], extensions)]
    has_duplicates = len({*keys}) <= num_samples or len({*extensions}) < width
    if num_samples < 1 or not is_regular or has_duplicates:
        return None
    starts, stops, ends, checksums = np.array(members[: count + 1], np.int64).T
    blocks = np.frombuffer(data, np.uint8, len(data) // BLOCK * BLOCK).reshape(-1, BLOCK)
    headers = blocks[starts // BLOCK]
    headers[:, 148:156] = ord(" ")  # in place of the checksum
    is_good = headers.sum(axis=1, dtype=np.int64) == checksums
    starts, stops, ends = starts[:count], stops[:count], ends[:count]
    sizes = (stops - starts - BLOCK).reshape(num_samples, width).sum(axis=1)
    if not is_good.all() or sizes.max() > max_bytes:
        return None
    crcs = crc32c_of_each(slices(data, starts + BLOCK, stops))
    parts = [
        header + crc.to_bytes(4, "little")
        for header, crc in zip(slices(data, starts, starts + BLOCK), crcs, strict=True)
    ]
    fields = {}
    for n, extension in enumerate(extensions):
        field_starts = starts[n::width] + BLOCK
        field_stops, no_prefixes = stops[n::width], np.zeros_like(field_starts)
        fields[extension.decode()] = FieldRanges("bytes", field_starts, field_stops, no_prefixes)
    return RecordChunk(
        data,
        offset,
        first_number=first,
        starts=starts[::width],
        stops=ends[width - 1 :: width],
        keys=[key.decode() for key in keys[:num_samples]],
        headers=[b"".join(parts[n : n + width]) for n in range(0, len(parts), width)],
        fields=fields,
    )
