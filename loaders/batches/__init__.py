"""Making batches: feed.py has `Feed`, and batcher.py turns its requests into batches for one pass.

samples.py reads, decodes and transforms, with _sample_map.py, _decoded_cache.py and
_shared_samples.py. spec_inference.py tries the callables first, by repeatability.py.
batch_function.py calls the function of a batch.
prepared.py has what both find out, which a batcher takes.
concurrency.py says how far ahead of the loop, prefetch.py has the threads, and meter.py measures
the times.
"""
