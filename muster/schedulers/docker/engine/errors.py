"""Errors of the engine. They do not need torchx. The scheduler prints each as one line."""

from muster._shared.contract import show_controls


def one_line(text: object) -> str:
    """Return the text with its lines joined into one."""
    return show_controls(" ".join(str(text).split()))


class DockerError(RuntimeError):
    """An error of the engine or the machine: one line with the request and the engine's answer."""


class EngineUnavailable(DockerError):
    """No engine answers (any more). It may answer again later."""


class NotFound(DockerError):
    """The object does not exist on the engine."""


class UnreadableLogs(DockerError):
    """The container's log driver keeps no output that could be read."""


class Conflict(DockerError):
    """The name exists already, or the object is in use."""


class CannotStart(DockerError):
    """A container was created but its command could not be started. `str()` is the engine's message."""


class NoAddressPool(DockerError):
    """The engine has no address pool left for another network (about 31 with its defaults)."""
