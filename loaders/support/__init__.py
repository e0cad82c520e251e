"""What every room needs: checks of arguments, files and folders, the machine, closing, wording.

Nothing here knows of shards, samplers or batches.

- Arguments: checks.py, with limits.py for sizes, counterparts.py for the options of other libraries
  and extras.py for what is not installed.
- Files and folders: regular.py opens, atomic.py replaces, temporary.py leaves nothing behind,
  owned.py marks the library's own folders, checksum.py has CRC-32C.
- The machine: system.py asks it, pool.py starts processes, closing.py closes, progress.py shows.
"""
