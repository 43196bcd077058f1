"""Which systems can run which scheduler. The supervisor of local_cwd and Docker needs Linux: pidfd, /proc, subreapers.

Elsewhere it could not find out which process owns an app or whether it is alive, and would be started again and again.
"""

import sys

from muster._shared import processes
from muster.schedulers.errors import PlatformError
from muster.schedulers.runner.command_line import print_errors_as_lines


def require_linux(scheduler: str) -> None:
    """Refuse any other system.

    Raises:
        PlatformError: one line that says what works here.
    """
    if processes.LINUX:
        return
    print_errors_as_lines()
    raise PlatformError(
        f"the scheduler {scheduler} needs Linux, this is {sys.platform}: run torchx in a Linux virtual machine or "
        "container with the engine's socket, or use kubernetes; local_cwd runs as TorchX's own"
    )
