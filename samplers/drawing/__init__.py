"""The primitives that samplers draw with: pure functions of keys and counters, over whole arrays.

random_words.py has the keys and the random words, permutation.py keyed permutations, blocks.py the
blocks of shards, and round_robin.py reads segments of a sequence side by side. fair_subsets.py
draws subsets equally often, interleave.py mixes streams in proportion, and interleave_schedule.py
in proportions that change. weighted_order.py draws by weight without replacement, prefix_sums.py
with replacement. batch_shape.py has P and K of each step, int_arrays.py small functions over
integer arrays, and fifo_cache.py a cache for the tables of recent epochs.
"""
