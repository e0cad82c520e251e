"""Reading by id: reader.py gives fields, and _fetch.py the bytes of fields.

- _handles.py holds the open files, and _ahead.py plans what is read ahead.
- _remote.py reads shards at a URL. _held.py holds what was fetched ahead.
- _asking.py serves workers for which another process reads.
- side_table.py joins memory-mapped arrays by sample id.
"""

from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.reading.side_table import SideTable

__all__ = ["Reader", "SideTable"]
