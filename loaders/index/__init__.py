"""The index: where every record and field lies, with labels and checksums, in memory-mapped arrays.

- opened.py is the index that is open. _store.py writes the folder of arrays, _arrays.py has their
  types, and opens and checks them. _paths.py has the paths of the shards.
- build.py builds the index. _sources.py and _shards.py find the shards, options.py says what is
  wanted of them, _collect.py takes it from each, with labels.py. _parts.py keeps what one shard
  gave, _survey.py sums the parts up, _merge.py joins them, with _classes.py for the labels.
  bad_records.py has the list of records to leave out.
"""

from twinfeed.loaders.index.opened import Field, Index, open_index

__all__ = ["Field", "Index", "open_index"]
