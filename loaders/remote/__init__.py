"""Stores of shards: what a URL leads to, read by ranges.

_store.py says what a store can do and chooses one by the URL: _objects.py (obstore) or _files.py
(fsspec). _helper.py reads for a process that was forked from one that used obstore, over _link.py.
_network.py has the constants and the attempts, _wire.py the requests in flight. _download.py brings
whole files here. cache.py names a cache on a disk: _disk.py has its entries, _chunks.py reads
through it, and _uses.py knows when each chunk is needed next.
"""
