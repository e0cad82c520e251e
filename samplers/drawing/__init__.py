"""The primitives that samplers draw with: pure functions of keys and counters, over whole arrays.

bits.py has the keys and words, permutation.py keyed permutations, lanes.py and blocks.py shuffles
of blocks, and fair.py draws that leave nothing out. mending.py takes out records that come twice.
waits.py draws by weight, with the running sums of sums.py. batch_shape.py changes P and K over an
epoch, and memo.py keeps the tables of the last epochs.
"""
