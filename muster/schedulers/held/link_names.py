"""What the driver agrees on with its links and the scheduler. Standard library only: each loads no more of another."""

from typing import Final

LOCK: Final = "hold"
"""Name of the lent descriptor that keeps the hold."""
GATE_NAME: Final = "claimed"
"""In the app's state folder: the run has node 0 of the hold."""
WORKSPACE_NAME: Final = "workspace.json"
"""In the app's state folder: the entries of the workspace, see `packing.list_workspace`."""
