"""The index: where every record and field lies, with labels and checksums, in memory-mapped arrays.

opened.py is the index that is open, with the arrays that it must have, and opener.py finds its
shards. sizes.py says how large its records are. manifest.py reads and checks the manifest and has
the version of the format, arrays.py maps arrays, class_arrays.py checks the records by class, and
remote_index.py copies an index from and to a URL. paths.py has the paths of the shards, and
options.py how an index was built. The room building/ writes indexes: _survey.py the arrays of
shards, _merge.py those of records, _classes.py those of classes.
"""

from twinfeed.loaders.index.opened import Field, Index
from twinfeed.loaders.index.opener import open_index

__all__ = ["Field", "Index", "open_index"]
