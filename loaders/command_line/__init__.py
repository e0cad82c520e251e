"""The command `twinfeed`: _parser.py reads arguments, _commands.py runs, _workers.py shares the
work among processes, _preview.py shows records, _wording.py prints.
"""

from twinfeed.loaders.command_line._parser import main

__all__ = ["main"]
