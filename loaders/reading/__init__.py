"""Reading by id: reader.py gives fields, and a fetcher the bytes of fields.

- fetcher.py has what the three fetchers have in common: local.py (shards, by the open files of
  handles.py), whole_files.py (loose files) and remote.py (what lies at a URL).
- prefetch/ says what is fetched before it is needed.
- source.py is what a feed needs of a source of records.
- rows.py makes a source of any dataset that gives its records by number.
- side_table.py joins memory-mapped arrays by sample id.
"""

from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.reading.side_table import SideTable

__all__ = ["Reader", "SideTable"]
