"""`python -m rlkit` is `rlkit`."""

import sys

from rlkit.commands.cli import main

sys.exit(main())
