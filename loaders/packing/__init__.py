"""Writing shards: `pack` divides samples over them, and indexes them.

_pack.py is `pack`. _inputs.py says what can be packed, with _compressed.py for compressed shards,
_sample_check.py checks samples, _split.py divides them over shards, _shard_writer.py writes shards,
and _publish.py moves the finished files to their folder.
"""

from twinfeed.loaders.packing._pack import pack
from twinfeed.loaders.packing._shard_writer import SHARD_BYTES, ShardContainer

__all__ = ["SHARD_BYTES", "ShardContainer", "pack"]
