"""The index: where every record and field lies, with labels and checksums, in memory-mapped arrays.

index.py is the class `Index` with the arrays that it must have, and open.py has `open_index`, which
finds the shards. sizes.py measures the records. manifest.py reads and checks the manifest and has
the version of the format, arrays.py maps arrays, and remote_index.py copies an index from a
URL. paths.py has the paths of the shards, and options.py the options of a build. The room building/
writes indexes: _part_stats.py the arrays of shards, _merge.py those of records, classes.py those of
classes.
"""

from twinfeed.loaders.index.index import Field, Index
from twinfeed.loaders.index.open import open_index

__all__ = ["Field", "Index", "open_index"]
