"""What a feed does to one record or one batch: no thread, no cache, no position.

config.py says what a feed knows, and missing_values.py what a field that a record lacks becomes.
request.py names the samples of a batch, and collate.py makes arrays of the values. decode.py,
seeded.py and shuffling.py have ready-made arguments of a feed.
"""
