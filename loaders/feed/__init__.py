"""What a training is fed, as values: nothing here has a thread, a cache or a position.

feed.py has `Feed`, definition.py the plain definition of its batches. request.py names the samples
of a batch, calling.py calls a user's function for one of them, _absent.py says what a field that a
record lacks becomes, and collate.py makes arrays of their values. decode.py, extensions.py,
seeded.py and shuffling.py are batteries for the arguments of a feed.
"""
