"""Object stores, web servers and file systems at a URL, read by byte ranges.

- url.py parses URLs, and refuses unsafe ones.
- store.py is the base class `Store`. open_store.py chooses its subclass by the scheme:
  _object_store.py (obstore), _http.py (web servers, over the connections of _http_connections.py)
  or _fsspec_store.py (fsspec).
- retries.py has the network settings, retries with back-off, and transient errors.
  request_pool.py has the requests in flight. download.py copies whole files to this machine.
- disk_cache.py is the setting of a cache on a disk, and disk.py its entries.
"""
