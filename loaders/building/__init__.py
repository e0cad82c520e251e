"""Building an index: `build_index` finds the shards, scans each, and writes the arrays.

build.py is `build_index`. sources.py and shards.py find the shards. plan.py says what is taken of
the records, with labels.py and bad_records.py. _collect.py takes it from one shard, _parts.py keeps
it, _survey.py sums the parts up, and _merge.py joins them, with _classes.py for the labels.
store.py writes.
"""
