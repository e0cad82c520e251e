"""The command `twinfeed`: _parser.py reads the arguments, _commands.py runs the commands.

_feeds.py draws batches and imports feeds, _preview.py shows records, and _printing.py prints.
"""

from twinfeed.loaders.command_line._parser import main

__all__ = ["main"]
