"""Writing shards: pack.py divides samples (samples.py) over them, shard_writer.py writes."""
