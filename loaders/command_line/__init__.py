"""The command `twinfeed`: _parser.py reads the arguments, _commands.py runs the commands.

_feeds.py imports feeds, and _printing.py prints.
"""

from twinfeed.loaders.command_line._parser import main

__all__ = ["main"]
