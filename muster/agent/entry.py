"""The file that adapters run instead of `-m muster.agent` if muster is installed.

With `-m` the working directory is on `sys.path` before our code runs, and Python itself imports from there. So a user's
types.py or operator.py would end the agent. With a file, the working directory is not on `sys.path`.
"""

import os
import sys

if __name__ == "__main__":
    # With -P or PYTHONSAFEPATH it is not first.
    if sys.path[:1] == [os.path.dirname(os.path.realpath(__file__))]:
        del sys.path[0]

    if sys.flags.no_site:  # hides all packages (see `_shared.programs`)
        sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

    from muster.agent.__main__ import main

    sys.exit(main())
