"""What the driver and its links agree on. Standard library only: a supervisor needs no more of a link."""

from typing import Final

LOST: Final = 255
"""Exit code of a link whose node is lost, or not reached."""
STATE_NAME: Final = "link.json"
"""In the replica's folder: why the node was lost."""
GATE_NAME: Final = "claimed"
"""In the app's state folder: the run has node 0 of the hold."""
WORKSPACE_NAME: Final = "workspace.json"
"""In the app's state folder: the entries of the workspace, see `packing.list_workspace`."""
