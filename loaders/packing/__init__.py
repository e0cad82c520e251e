"""Writing shards: pack.py divides samples (samples.py) over them, check.py refuses what is no
sample, shard_writer.py writes.
"""
