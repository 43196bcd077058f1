"""`folders`: a scheduler for TorchX whose replicas are processes of this machine, each in a folder of its own."""

from muster.schedulers.adapter import Factory

create_scheduler = Factory(name="folders", creates="folders.scheduler:FolderScheduler")
"""The entry point names it."""
