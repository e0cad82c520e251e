"""What a training loop iterates over: loader.py keeps the position and begins and ends passes.

uncounted.py begins the passes of frameworks that do not say what they received. feed_loader.py
adds what a feed needs, and numpy_loader.py is the loader without a framework. selector.py gives
only the numbers of the sources that a sampler chooses.
"""
