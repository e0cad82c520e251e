"""Stores of shards: what a URL leads to, read by ranges.

- location.py parses URLs, and says which URLs are refused.
- stores.py says what a store can do. opening.py chooses the store by the location: _objects.py
  (obstore), _web.py (web servers, over the connections of _connections.py) or _fsspec.py (fsspec).
- network.py has the constants and the attempts. request_pool.py has the requests in flight.
  download.py brings whole files here.
- cache.py names a cache on a disk. disk.py has the entries of the cache.
"""
