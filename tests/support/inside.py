"""Private names that laws, faults and helpers use; unit/ and backends/ ask the module itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import pytest

from twinfeed.loaders.batches.batcher import Batcher
from twinfeed.loaders.batches.feed import Feed, recipe_of
from twinfeed.loaders.building import build, shards
from twinfeed.loaders.building._merge import write_index
from twinfeed.loaders.building._part_stats import IndexStats
from twinfeed.loaders.building._parts import load_part
from twinfeed.loaders.building.plan import BuildPlan
from twinfeed.loaders.building.shards import expand
from twinfeed.loaders.building.sources import find_source
from twinfeed.loaders.command_line import main
from twinfeed.loaders.command_line._feeds import load_feed
from twinfeed.loaders.command_line._parser import _parser
from twinfeed.loaders.errors import REBUILD
from twinfeed.loaders.feed.collate import collate
from twinfeed.loaders.formats import tar, tfrecord
from twinfeed.loaders.formats._protobuf import length_delimited, varint
from twinfeed.loaders.formats.example import decode_list, encode, locate, parse_sequence
from twinfeed.loaders.formats.records import CONTAINERS, Record
from twinfeed.loaders.formats.sniff import COMPRESSED, IMAGES
from twinfeed.loaders.formats.tar import TarWriter
from twinfeed.loaders.formats.tfrecord import TFRecordWriter
from twinfeed.loaders.index import arrays, manifest
from twinfeed.loaders.index.arrays import StringColumn
from twinfeed.loaders.index.manifest import MANIFEST, VERSION, file_digest, json_digest
from twinfeed.loaders.index.options import Missing, Reading, ReadingOptions
from twinfeed.loaders.packing import SHARD_BYTES, ShardContainer
from twinfeed.loaders.packing._compressed import decompressed_samples
from twinfeed.loaders.reading import local
from twinfeed.loaders.reading.missing import StoredFields
from twinfeed.loaders.reading.prefetch.read_plan import (
    NO_BLOCK,
    Fetch,
    gap_of,
    ranges_of_records,
)
from twinfeed.loaders.reading.prefetch.schedule import Request, Schedule, of_all_ranks
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.reading.source import Reads, reader_of
from twinfeed.loaders.storage import _http_connections, open_store, retries
from twinfeed.loaders.storage.open_store import store_of
from twinfeed.loaders.storage.url import Location, unquoted
from twinfeed.loaders.support import temporary
from twinfeed.loaders.support.atomic import replace_file
from twinfeed.loaders.support.checksum import crc32c, masked_crc32c
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.pool import Pool
from twinfeed.loaders.support.temporary import temporary_folder
from twinfeed.loaders.tools.backends import BACKENDS
from twinfeed.samplers.drawing import prefix_sums


def batcher_of(feed: Feed, **options: Any) -> Batcher:
    """Return what makes the batches of a feed."""
    return Batcher(recipe_of(feed), **options)


def fetch_ahead(reader: Reader, ranges: Any) -> None:
    """Have ranges fetched, as the plan of a pass has."""
    local_or_remote: Any = reader._files()
    if reader.index.remote:
        local_or_remote.buffer.apply(Fetch(ranges))
    else:
        local_or_remote.kernel_readahead.add(local_or_remote.with_descriptors(ranges))


@contextmanager
def few_open_files(limit: int) -> Iterator[None]:
    """Let the readers that are made within it keep at most so many shards open together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "open_limit", lambda: limit)
        patch.setattr(local.Handles, "_caches", WeakSet())
        yield
