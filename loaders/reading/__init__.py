"""Reading by id: reader.py gives the fields of records.

- together.py reads records in one call, or one by one after an error.
- local.py reads shards, through few open files, and loose files. remote.py fetches what lies at a
  URL.
- prefetch/ fetches ranges before they are needed.
- source.py has the sources of records for a feed, and checks what a source of one's own returns.
- missing.py checks the values for fields that records lack, and fills them in.
- dataset_source.py makes a source of any dataset that gives its records by number.
  _map_datasets.py reads each kind of dataset, and _arrow_datasets.py those with pyarrow's columns.
- by_key.py joins a table by the key of each record.
- side_table.py has the tables that are joined by sample id, or by record.
"""

from twinfeed.loaders.reading.by_key import ByKey
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.reading.side_table import ByRecord, SideTable

__all__ = ["ByKey", "ByRecord", "Reader", "SideTable"]
