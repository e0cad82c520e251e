"""The command `twinfeed`, or `python -m twinfeed`: an interrupt at any time ends it with one line.

Importing the command line takes most of the time of a short command, and an interrupt meanwhile
would show a traceback.
"""

import os
import signal
import sys
from contextlib import suppress


def main() -> int:
    """Run the command line and return its exit status."""
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handled:
        signal.signal(signal.SIGINT, _end)  # while modules are imported, nothing has started
    from twinfeed.loaders.command_line import main as run

    if handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run()
    except KeyboardInterrupt:
        return _end()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second interrupt would show a traceback


def _end(*_: object) -> int:
    """Print one line and exit with status 130, as after SIGINT."""
    os.write(2, b"twinfeed: interrupted\n")
    # multiprocessing would print lines of its own about leaked semaphores.
    if util := sys.modules.get("multiprocessing.util"):
        with suppress(Exception):
            util._run_finalizers(0)
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
