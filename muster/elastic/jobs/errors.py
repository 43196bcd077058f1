"""What `muster.elastic` raises where torch has no class of its own for it."""

import pickle
from collections.abc import Mapping
from typing import Any

from muster.agent.errors import EnvironmentFault, UsageError


class PickleFault(UsageError, pickle.PicklingError):
    """Something cannot be sent to the workers, or come back. `str()` names the object."""


class AgentLost(EnvironmentFault):
    """The job's muster process was killed. No process of the job is left on this node."""


class ResultsMissing(EnvironmentFault):
    """The job succeeded, but results of some ranks of other nodes did not come here. `str()` names them."""

    results: Mapping[int, Any] = {}  # set where this node's are known
    """What this node's workers returned, by global rank."""


class RemoteTraceback(Exception):
    """The traceback of an exception in a worker, as text: the cause of the exception that is raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text.rstrip()}\n"""'


class WorkerFailed(Exception):
    """Stands for the failure of a worker that raised no exception (a signal, `os._exit`), or none that can be sent."""
