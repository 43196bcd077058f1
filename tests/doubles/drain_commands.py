"""What only tests read of a command in the status page."""

from muster._shared.layouts import StatusPageLayout as Layout


def get_drain(command: int) -> int:
    """Return the drain's id: the highest bits of the word."""
    return command // Layout.pack_command(drain=1, kind=0, step=0, is_committed=False)
