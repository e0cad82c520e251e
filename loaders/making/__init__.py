"""Making batches fast: batcher.py turns a request into a batch, for one pass.

samples.py reads, decodes and transforms, with _calls.py, _decoded.py and _shared.py. trial.py tries
the callables first. maker.py gives any batch, ahead.py makes batches ahead of the loop, prefetch.py
has the thread, and meter.py adds up where the time went.
"""
