"""The file by which the default hold is started: it detaches itself from its parent, then imports."""

import os
import sys

if __name__ == "__main__":
    # A pool that has begun again (`_shared.holds.default.POOL_AGAIN`) is already detached.
    if sys.argv[1:2] != ["--again"] and os.fork():
        os._exit(0)  # the starter waits for this process
    # For an uninstalled package: -I omits this file's folder.
    sys.path.append(os.path.abspath(f"{__file__}/../../../.."))
    from muster.agent.hold.pool import main

    sys.exit(main(sys.argv[1:]))
