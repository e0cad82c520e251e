"""The command `twinfeed`: parser.py reads arguments, commands.py runs, preview.py shows records,
wording.py has the library's messages name options.
"""

from twinfeed.loaders.command_line.parser import main

__all__ = ["main"]
