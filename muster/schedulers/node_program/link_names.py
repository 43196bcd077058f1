"""What a driver agrees on with its links. Standard library only: each loads no more of the other."""

from typing import Final

LOST: Final = 255
"""Exit code of a link whose node is lost: it is not reached, or has not started the replica."""
STATE_NAME: Final = "link.json"
"""In the replica's folder: what the link keeps, and why the node was lost."""
