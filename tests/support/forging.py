"""Other bytes with the same checksum."""

from support.inside import crc32c


def forged(wanted: bytes, crc: int) -> bytes:
    """Return `wanted` with its last four bytes chosen so that it has this CRC-32C."""
    start = wanted[:-4]
    base = crc32c(start + bytes(4))
    rows = [
        (crc32c(start + (1 << bit).to_bytes(4, "little")) ^ base, 1 << bit) for bit in range(32)
    ]
    left, tail = crc ^ base, 0
    for bit in reversed(range(32)):  # Gauss, in the field of two elements
        pivot = next(row for row in rows if row[0] >> bit & 1)
        rows = [
            (one[0] ^ pivot[0], one[1] ^ pivot[1]) if one[0] >> bit & 1 else one
            for one in rows
            if one is not pivot
        ]
        if left >> bit & 1:
            left, tail = left ^ pivot[0], tail ^ pivot[1]
    return start + tail.to_bytes(4, "little")
