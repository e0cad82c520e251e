"""Try decode and transform on the first sample: their results must depend on the sample alone."""

from __future__ import annotations

from contextlib import closing

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.feed.collate import FieldSpec
from twinfeed.loaders.feed.feed import Feed
from twinfeed.loaders.making.samples import Samples, joined_rows, known_to_repeat
from twinfeed.loaders.reading.source import reader_of


def tried(feed: Feed, /) -> dict[str, FieldSpec]:
    """Return the spec of a feed whose decode and transform were tried, once for a feed.

    They are called repeatedly, under different global random states.

    Raises:
        ValueError: two calls give two results. Errors of decode and transform are raised too.
    """
    spec = dict(feed.spec)
    if "_tried" in vars(feed) or (feed.transform is None and known_to_repeat(feed.decode)):
        return spec
    first = feed._first
    try:
        with closing(reader_of(feed.index)) as reader:
            Samples(feed, reader).tried(first, joined_rows(feed.index, feed.side, first))
    except (LoaderError, OSError):
        if feed._given_spec is None:
            raise
        return spec  # the sample may be damaged, and never drawn by a pass that resumes
    vars(feed)["_tried"] = True
    return spec
