"""Helpers of all rooms: arguments, files and folders, processes.

Nothing here depends on shards, samplers or batches.

- Arguments: array_types.py has types of arrays, limits.py the largest sizes, extras.py errors for
  packages that are not installed. checks.py checks names and ids, samplers/validate.py numbers.
- Objects: display.py has what they show of themselves.
- Files and folders: regular.py opens regular files, csv_columns.py reads tables, atomic.py
  publishes whole ones, temporary.py makes temporary folders, checksum.py has CRC-32C.
- The machine: system.py asks the operating system. pool.py has a process pool, fork.py values
  per process, lock.py a lock, closing.py a context manager, progress.py a progress bar.
"""
