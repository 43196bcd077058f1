"""`folders`: a scheduler for TorchX whose replicas are processes of this machine, each in a folder of its own."""

from typing import Any


def create_scheduler(session_name: str, **_: Any) -> Any:
    """Make the scheduler; the entry point names this function."""
    from folders.scheduler import FolderScheduler

    return FolderScheduler("folders", session_name)
