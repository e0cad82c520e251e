"""Loaders, over which a training loop iterates.

run.py has the position of a loader, and loader.py starts and ends passes.

adapter.py serves frameworks that iterate by themselves. feed_loader.py adds what a feed needs, and
numpy_loader.py is the loader without a framework. record_state.py is what a state says of records.
selector.py gives only the numbers of the sources that a sampler chooses.
"""
