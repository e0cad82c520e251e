"""`python -m twinfeed.loaders`: the command line."""

import sys

from twinfeed.loaders.command_line import main

if __name__ == "__main__":
    sys.exit(main())
