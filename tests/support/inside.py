"""The names of the inside that tests of behaviour use: when a module moves, this file follows.

Tests below `tests/samplers` and `tests/loaders` are of the module at the same path, and import it.
"""

from typing import Any

from twinfeed.loaders.building import (
    _classes,
    _merge,
    _parts,
    _scan_shard,
    build,
    shards,
    sources,
    writer,
)
from twinfeed.loaders.building._merge import write_index
from twinfeed.loaders.building._part_stats import IndexStats
from twinfeed.loaders.building._parts import FieldStats, ShardPart, load_part, new_part
from twinfeed.loaders.building.bad_records import BadRecord, read_bad_records
from twinfeed.loaders.building.image_folder import list_images
from twinfeed.loaders.building.plan import BuildPlan
from twinfeed.loaders.building.shards import expand
from twinfeed.loaders.building.sources import find_source
from twinfeed.loaders.building.writer import index_writer
from twinfeed.loaders.command_line import main
from twinfeed.loaders.command_line._feeds import sampler_of
from twinfeed.loaders.command_line._parser import _parser
from twinfeed.loaders.errors import REBUILD
from twinfeed.loaders.feed.collate import collate
from twinfeed.loaders.feed.request import Request
from twinfeed.loaders.formats import files, tar, tfrecord
from twinfeed.loaders.formats._protobuf import length_delimited, varint
from twinfeed.loaders.formats.example import decode_list, encode, locate, parse_sequence
from twinfeed.loaders.formats.files import Entry
from twinfeed.loaders.formats.records import Record
from twinfeed.loaders.formats.sniff import COMPRESSED, IMAGES
from twinfeed.loaders.formats.tar import TarWriter
from twinfeed.loaders.formats.tfrecord import TFRecordWriter
from twinfeed.loaders.index import arrays, manifest, paths, remote_index
from twinfeed.loaders.index.arrays import StringColumn, integer_type, row_type
from twinfeed.loaders.index.index import SHARD
from twinfeed.loaders.index.manifest import MANIFEST, VERSION, file_digest, json_digest
from twinfeed.loaders.index.options import IndexOptions, Reading, ReadingOptions
from twinfeed.loaders.index.paths import PUBLISHING
from twinfeed.loaders.making.batcher import Batcher
from twinfeed.loaders.making.feed import Feed, compile_feed
from twinfeed.loaders.packing import ShardContainer, _compressed, _inputs, _shard_writer
from twinfeed.loaders.packing._compressed import samples_of
from twinfeed.loaders.reading import local
from twinfeed.loaders.reading.handles import Handles
from twinfeed.loaders.reading.local import near_rows
from twinfeed.loaders.reading.prefetch import chunk_cache
from twinfeed.loaders.reading.prefetch.read_plan import (
    EXTENT,
    NO_SPAN,
    Fetch,
    ReadPlan,
    extents_of_records,
    gap_of,
)
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.reading.read_step import ReadStep, start_pass
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.reading.source import (
    OwnSource,
    Reads,
    reader_of,
    values_of,
)
from twinfeed.loaders.storage import (
    _http_connections,
    disk,
    open_store,
    request_pool,
    retries,
)
from twinfeed.loaders.storage.disk import Disk
from twinfeed.loaders.storage.disk_cache import cache_of_environment
from twinfeed.loaders.storage.open_store import store_of
from twinfeed.loaders.storage.request_pool import RequestPool
from twinfeed.loaders.storage.url import Location, allowed, quoted, unquoted
from twinfeed.loaders.storage.url import masked as masked_text
from twinfeed.loaders.support import atomic
from twinfeed.loaders.support.atomic import replace_file
from twinfeed.loaders.support.checksum import crc32c, masked_crc32c
from twinfeed.loaders.support.deletable import MARK, mark_deletable
from twinfeed.loaders.support.limits import LIMITS, Limits
from twinfeed.loaders.support.pool import Pool
from twinfeed.samplers.cursor import Cursor
from twinfeed.samplers.drawing import prefix_sums
from twinfeed.samplers.drawing.weighted_order import log


def batcher_of(feed: Feed, **options: Any) -> Batcher:
    """Return what makes the batches of a feed."""
    return Batcher(compile_feed(feed), **options)


def buffered(reader: Reader) -> list[tuple[int, int, int]]:
    """Return the file, the start and the stop of each range that a reader has fetched ahead."""
    return list(getattr(reader._files, "buffer", ()))


def fetch_ahead(reader: Reader, extents: Any) -> None:
    """Have ranges fetched, as the plan of a pass has."""
    local_or_remote: Any = reader._files
    if reader.index.remote:
        local_or_remote.buffer.apply(Fetch(extents))
    else:
        local_or_remote.advice.add(local_or_remote.opened(extents))
