"""Building an index: `build_index` finds the shards, scans each, and writes the arrays.

build.py is `build_index`. sources.py and shards.py find the shards. plan.py says what is taken of
the records, with labels.py and bad_records.py. _collect.py makes the part of one shard, _parts.py
keeps parts, _survey.py sums them up, and _merge.py joins them, with _classes.py for the labels.
store.py writes.
"""
