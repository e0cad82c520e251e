"""Reading by id: reader.py gives fields, and a fetcher the bytes of fields.

- local.py fetches from local shards and files, with the open files of _handles.py.
- _remote.py fetches from shards at a URL.
- source.py is what a feed needs of a source of records.
- rows.py makes a source of any dataset that gives its records by number.
- side_table.py joins memory-mapped arrays by sample id.
"""

from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.reading.side_table import SideTable

__all__ = ["Reader", "SideTable"]
