"""The command `twinfeed`: parser.py reads arguments, commands.py runs, preview.py shows records."""

from twinfeed.loaders.command_line.parser import main

__all__ = ["main"]
