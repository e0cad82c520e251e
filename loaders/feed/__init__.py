"""The processing of one record or one batch by a feed, without threads, caches or a position.

arguments.py checks the arguments of a feed. collate.py makes arrays of the values of a batch.
decode.py, seeded.py and shuffling.py have ready-made arguments of a feed.
"""
