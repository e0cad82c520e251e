"""The command `twinfeed`: parser.py reads arguments, commands.py runs, workers.py shares the work
among processes, preview.py shows records, wording.py has the library's messages name options.
"""

from twinfeed.loaders.command_line.parser import main

__all__ = ["main"]
