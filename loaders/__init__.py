"""Bring the records a sampler names from shards into TensorFlow and PyTorch.

Shards: `pack` and `ImageFolder` (packing/) write them; `build_index` and `open_index` (index/) tell
where each record and field lies, in TFRecord files, webdataset tar files or loose files (formats/);
`Reader` (reading/) reads records by id, `SideTable` rows; `verify` (verify.py) reads every byte.

Batches: a `Feed` (feed.py) says what a training is fed. `NumpyLoader` (numpy_loader.py) carries the
feed to a loop, and so do the loaders of the backends, which import their framework:
`twinfeed.loaders.torch` and `twinfeed.loaders.tensorflow`. `twinfeed.loaders.keras` resumes `fit`.
`DecodeImage` and other batteries (decode.py, extensions.py) decode, `Seeded` (seeded.py) makes
transforms repeatable. `compare` (compare.py) runs several frameworks and tells what differs,
`twinfeed.loaders.pictures` draws streams and batches, and `write_report` (report.py) puts findings
and pictures on a page. The command `twinfeed` is command_line/.
"""

import twinfeed.loaders._system  # noqa: F401 - first, since on Windows the message is there
from twinfeed.loaders._batcher import Batch
from twinfeed.loaders._loader import Loader
from twinfeed.loaders._meter import PassReport
from twinfeed.loaders._samples import Sample
from twinfeed.loaders.collate import FieldSpec, Ragged
from twinfeed.loaders.compare import Comparison, Run, compare
from twinfeed.loaders.decode import DecodeArray, DecodeExample, DecodeImage
from twinfeed.loaders.errors import (
    DataCorruptionError,
    DecodeError,
    IndexFormatError,
    LoaderError,
    ShardWarning,
    StaleIndexError,
    TruncatedShardError,
    UnsafeContentError,
    WorkerDiedError,
)
from twinfeed.loaders.extensions import DecodeExtensions
from twinfeed.loaders.feed import Decode, Feed
from twinfeed.loaders.formats.files import Entry
from twinfeed.loaders.index import Field, Index, open_index
from twinfeed.loaders.index._arrays import StringColumn
from twinfeed.loaders.index.bad_records import BadRecord
from twinfeed.loaders.index.build import build_index, build_parts, merge_parts
from twinfeed.loaders.index.labels import FromFolder, FromJson, FromTable
from twinfeed.loaders.index.options import IndexOptions, Reading
from twinfeed.loaders.limits import LIMITS, Limits
from twinfeed.loaders.numpy_loader import NumpyLoader
from twinfeed.loaders.packing import ImageFolder, LooseFiles, pack
from twinfeed.loaders.planning import Plan, plan
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.reading.side_table import SideTable
from twinfeed.loaders.remote.cache import DiskCache
from twinfeed.loaders.report import write_report
from twinfeed.loaders.request import Request
from twinfeed.loaders.seeded import HasRandomSeed, Seeded
from twinfeed.loaders.shuffling import shuffled
from twinfeed.loaders.verify import Report, verify
from twinfeed.samplers import StateMismatchError

__all__ = [
    "LIMITS",
    "BadRecord",
    "Batch",
    "Comparison",
    "DataCorruptionError",
    "Decode",
    "DecodeArray",
    "DecodeError",
    "DecodeExample",
    "DecodeExtensions",
    "DecodeImage",
    "DiskCache",
    "Entry",
    "Feed",
    "Field",
    "FieldSpec",
    "FromFolder",
    "FromJson",
    "FromTable",
    "HasRandomSeed",
    "ImageFolder",
    "Index",
    "IndexFormatError",
    "IndexOptions",
    "Limits",
    "Loader",
    "LoaderError",
    "LooseFiles",
    "NumpyLoader",
    "PassReport",
    "Plan",
    "Ragged",
    "Reader",
    "Reading",
    "Report",
    "Request",
    "Run",
    "Sample",
    "Seeded",
    "ShardWarning",
    "SideTable",
    "StaleIndexError",
    "StateMismatchError",
    "StringColumn",
    "TruncatedShardError",
    "UnsafeContentError",
    "WorkerDiedError",
    "build_index",
    "build_parts",
    "compare",
    "merge_parts",
    "open_index",
    "pack",
    "plan",
    "shuffled",
    "verify",
    "write_report",
]
