"""Building an index: `build_index` finds the shards, scans each, and writes the arrays.

build.py is `build_index`. sources.py, shards.py and image_folder.py find the shards. plan.py has
the fields, keys and labels to index, with labels.py and bad_records.py. _scan_shard.py scans one
shard into a part, with _field_buffer.py for each of its fields. _parts.py stores parts,
_part_stats.py has their totals, and _merge.py joins them, with classes.py for the labels.
writer.py writes the index and its manifest.
"""
