"""The JAX backend: the only package here that imports jax.

`JaxLoader` (loader.py) makes the rows that this process's devices hold, and gives global arrays.
"""

from twinfeed.loaders.support.extras import requires_extra

with requires_extra("twinfeed.loaders.jax", "jax"):
    from twinfeed.loaders.jax.loader import JaxLoader

__all__ = ["JaxLoader"]
