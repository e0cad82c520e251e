"""What every room needs: arrays, limits, files and folders, the machine, closing.

Nothing here knows of shards, samplers or batches.

- Arguments: array_types.py has types of arrays, limits.py the largest sizes, misnamed.py and
  counterparts.py the options of other libraries, extras.py what is not installed. checks.py checks
  names and ids, samplers/validate.py numbers.
- Files and folders: regular.py opens, atomic.py replaces, temporary.py makes folders that do not
  stay, owned.py marks the library's own folders, checksum.py has CRC-32C.
- The machine: system.py has its facts, pool.py starts processes, fork.py has what each
  process has of its own, closing.py closes, progress.py shows a bar.
"""
