"""Reading by id: reader.py gives fields, _fetch.py their bytes through few open files.

_handles.py holds the open files. _remote.py reads shards at a URL: _held.py has what was fetched
ahead, and _asking.py the workers for which another process reads. side_table.py joins memory-mapped
arrays by sample id.
"""

from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.reading.side_table import SideTable

__all__ = ["Reader", "SideTable"]
