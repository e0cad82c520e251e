"""The index: where every record and field lies, with labels and checksums, in memory-mapped arrays.

table.py is the index that is open; store.py writes its folder of arrays, arrays.py opens and checks
them, strings.py has its columns of strings, paths.py its shards' paths. build.py builds it:
sources.py and shards.py find the shards, plan.py says what is wanted of them, collect.py takes it
from each, with labels.py, parts.py keeps what one shard gave, merge.py joins the parts, with
numbering.py for the labels. bad_records.py lists those to leave out, exclude.py finds them again.
"""

from twinfeed.loaders.index.table import Field, Index, open_index

__all__ = ["Field", "Index", "open_index"]
