"""The index: where every record and field lies, with labels and checksums, in memory-mapped arrays.

- opened.py is the index that is open. _store.py writes its folder of arrays, _arrays.py opens and
  checks them, _columns.py has their types, _paths.py the paths of the shards.
- build.py builds the index. _sources.py and _shards.py find the shards, options.py says what is
  wanted of them, _collect.py takes it from each, with labels.py. _parts.py keeps what one
  shard gave, _survey.py sums the parts up, _merge.py joins them, with _numbering.py for the labels
  and _class_order.py. bad_records.py has the list of records to leave out.
"""

from twinfeed.loaders.index.opened import Field, Index, open_index

__all__ = ["Field", "Index", "open_index"]
