"""Making batches: feed.py has `Feed` and `recipe_of`, the recipe that is made once of a feed.

recipe.py has the `Recipe`, and batcher.py follows it, for each request, with _decoded_cache.py.
probing.py tries the functions of a recipe first, by repeatability.py. batch_function.py calls the
function of a batch. prefetch.py runs ahead of the loop on a thread, and meter.py measures.
"""
