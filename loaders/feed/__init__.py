"""What is said and done about one record or one batch: no thread, no cache, no position.

definition.py says what a feed knows. request.py names the samples of a batch, calling.py calls a
user's function for one of them, and collate.py makes arrays of their values. decode.py,
extensions.py, seeded.py and shuffling.py are batteries for the arguments of a feed.
"""
