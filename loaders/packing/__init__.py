"""Writing shards: `pack` divides samples over them, and indexes them.

_samples.py says what can be packed, _check.py refuses what is no sample, _split.py divides,
_shard_writer.py writes, _place.py puts in place.
"""

from twinfeed.loaders.packing._pack import Source, pack
from twinfeed.loaders.packing._samples import ImageFolder, LooseFiles, Sample
from twinfeed.loaders.packing._shard_writer import SHARD_BYTES, ShardContainer
from twinfeed.loaders.packing._split import Split

__all__ = [
    "SHARD_BYTES",
    "ImageFolder",
    "LooseFiles",
    "Sample",
    "ShardContainer",
    "Source",
    "Split",
    "pack",
]
