"""Prefetching: which byte ranges coming batches need, and the last step that uses each range.

Steps are global steps, but for the steps of an epoch in schedule.py.

- schedule.py has what a stream draws, block_uses.py which blocks the stream opens and closes.
- read_plan.py has the events of a stream: ranges to fetch, and blocks to release.
- kernel_readahead.py has local ranges read ahead. buffer.py fetches remote ranges, and keeps them.
- chunk_cache.py reads remote shards through a disk cache.
"""
