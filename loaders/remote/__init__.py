"""Stores of shards: what a URL leads to, read by ranges.

- _store.py says what a store can do, and chooses a store by the URL: _objects.py (obstore) or
  _files.py (fsspec). _helper.py reads, over _link.py, for a process that was forked from a process
  that used obstore.
- _network.py has the constants and the attempts. _wire.py has the requests in flight. _download.py
  brings whole files here.
- cache.py names a cache on a disk. _disk.py has the entries of the cache, _chunks.py reads through
  the cache, and _uses.py knows when each chunk is needed next.
"""
