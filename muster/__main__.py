"""`python -m muster COMMAND`. See `muster.cli`."""

import sys

from muster.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
