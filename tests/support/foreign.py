"""Messages of other protocol buffers, as TFRecord files of other programs hold them."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

from support.inside import encode, length_delimited, varint


def sub(number: int, *parts: bytes) -> bytes:
    """Encode a field of text, bytes or a message."""
    return length_delimited(number << 3 | 2, b"".join(parts))


def whole(number: int, value: int) -> bytes:
    """Encode an integer."""
    return varint(number << 3) + varint(value)


def real(number: int, value: float) -> bytes:
    """Encode a double."""
    return varint(number << 3 | 1) + struct.pack("<d", value)


def event(draw: random.Random) -> bytes:
    """Make an event of TensorBoard: the version of the file, or a summary."""
    value = sub(1, sub(1, word(draw)), b"\x15" + struct.pack("<f", draw.random()))
    body = sub(3, b"brain.Event:2") if draw.random() < 0.3 else sub(5, value)
    return real(1, 1.7e9) + whole(2, draw.randrange(300)) + body


def variant(draw: random.Random) -> bytes:
    """Make a variant of Nucleus, which DeepVariant reads from VCF."""
    quality = real(8, draw.random())
    place = whole(13, draw.randrange(9999)) + sub(14, b"chr1") + whole(16, draw.randrange(9999))
    return sub(3, word(draw)) + sub(6, word(draw)) + sub(7, b"A") + quality + place


def read(draw: random.Random) -> bytes:
    """Make a read of Nucleus, which comes of SAM: its second field is text."""
    return sub(2, word(draw)) + sub(6, b"ACGT") + sub(9, bytes([30, 31]))


def scenario(draw: random.Random) -> bytes:
    """Make a Scenario of Waymo's: times, tracks of an object each, and a name."""
    states = [sub(3, real(2, draw.random()), real(3, draw.random())) for _ in range(2)]
    track = sub(2, whole(1, draw.randrange(1, 99)), whole(2, 1), *states)
    return real(1, 0.0) + real(1, 0.1) + track * draw.randrange(1, 3) + sub(5, word(draw))


def ranking(draw: random.Random) -> bytes:
    """Make tensorflow_ranking's ExampleListWithContext; some have no context."""
    examples = [sub(1, encode({"relevance": n, "x": 0.5})) for n in range(draw.randrange(1, 3))]
    return b"".join(examples) + draw.choice((b"", sub(2, encode({"query": word(draw)}))))


def layers(draw: random.Random) -> bytes:
    """Make named shapes, whose messages are nested as those of an Example are."""
    point = b"\x0d" + struct.pack("<f", draw.random()) + b"\x15" + struct.pack("<f", draw.random())
    return sub(draw.choice((1, 2)), sub(1, sub(1, word(draw)), sub(2, sub(1, point))))


def tree(draw: random.Random) -> bytes:
    """Make a message of numbers and text alone, in a message or not."""
    parts = [
        draw.choice((whole(n, draw.getrandbits(20) + 1), real(n, 0.5), sub(n + 2, word(draw))))
        for n in range(1, draw.randrange(2, 5))
    ]
    return draw.choice((b"".join(parts), sub(draw.randrange(1, 4), *parts)))


def word(draw: random.Random) -> bytes:
    """Return text of lower-case letters."""
    return bytes(draw.choices(range(97, 123), k=draw.randrange(1, 9)))


FOREIGN: dict[str, Callable[[random.Random], bytes]] = {
    kind.__name__: kind for kind in (event, variant, read, scenario, ranking, layers, tree)
}
"""What makes a random message of each kind. No kind has a feature of an Example."""
