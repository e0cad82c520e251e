"""Reading by id: reader.py gives fields, and a fetcher (fetcher.py) the bytes of fields.

- local.py fetches from local shards and files, with the open files of _handles.py.
- _remote.py fetches from shards at a URL. held.py holds what was fetched before it is needed.
- schedule.py has what a stream draws, planner.py reads ahead of it, and ranges.py says what is read
  in one piece.
- source.py is what a feed asks of whatever holds its records.
- side_table.py joins memory-mapped arrays by sample id.
"""

from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.reading.side_table import SideTable

__all__ = ["Reader", "SideTable"]
