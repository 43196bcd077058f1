"""The file by which the default hold is started: it becomes nobody's child, then imports."""

import os
import sys

if __name__ == "__main__":
    # One that has begun again (`_shared.holds.default.POOL_AGAIN`) is detached already.
    if sys.argv[1:2] != ["--again"] and os.fork():
        os._exit(0)  # whoever has started it waits for this process
    # Our own package, also where it is not installed; -I has left out the folder of this file.
    sys.path.append(os.path.abspath(f"{__file__}/../../../.."))
    from muster.agent.hold.pool import main

    sys.exit(main(sys.argv[1:]))
