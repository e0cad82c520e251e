"""The index: where every record and field lies, with labels and checksums, in memory-mapped arrays.

- opened.py is the index that is open. _store.py writes the folder of arrays, _arrays.py has their
  types, and opens and checks them. _paths.py has the paths of the shards.
- build.py builds the index. _sources.py and _shards.py find the shards. options.py says what an
  index holds of the shards, and _collect.py with labels.py takes this from each shard. _parts.py
  keeps what one shard gave, and _survey.py sums the parts up. _merge.py joins the parts, with
  _classes.py for the labels. bad_records.py has the list of records to leave out.
"""

from twinfeed.loaders.index.opened import Field, Index, open_index

__all__ = ["Field", "Index", "open_index"]
