"""What an interpreter that has muster is given to run in place of `-m muster.agent`.

With `-m` the working directory is on `sys.path` before a line of ours runs, and Python itself imports from there: a
types.py or an operator.py of the user's, meant for something else, ends the agent. A file is started without.
"""

import os
import sys

if __name__ == "__main__":
    # Not the first with -P or PYTHONSAFEPATH.
    if sys.path[:1] == [os.path.dirname(os.path.realpath(__file__))]:
        del sys.path[0]

    from muster.agent.__main__ import main

    sys.exit(main())
