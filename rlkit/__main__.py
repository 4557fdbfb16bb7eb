"""`python -m rlkit` is `rlkit`."""

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # while rlkit is imported, Ctrl-C ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from rlkit.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
