"""What people are shown of a running job: `status_file` writes how far it is. Nothing of it is ever waited for.

Not here: what must not be lost (failures, checkpoints), which are events and messages of rendezvous.

Imported when a rank has done its first step, never before the first worker.

From outside, import `Pause` and `StatusFile`.
"""

from muster.agent.telemetry.status_file import Pause, StatusFile

__all__ = ["Pause", "StatusFile"]
