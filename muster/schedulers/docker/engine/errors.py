"""What can go wrong with the engine. No torchx here; the scheduler makes one console line of each."""


def one_line(text: object) -> str:
    """What was output over several lines, in one."""
    return " ".join(str(text).split())


class DockerError(RuntimeError):
    """The engine or the machine: one line that says what was asked and what the engine output."""


class EngineUnavailable(DockerError):
    """No engine answers (any more). It may come back."""


class NotFound(DockerError):
    """What was asked for does not exist on the engine."""


class Conflict(DockerError):
    """The name is taken, or the thing is in use."""


class CannotStart(DockerError):
    """A container was created but its command could not be started; `str()` is what the engine output."""


class NoAddressPool(DockerError):
    """The engine has no address pool left for another network (about 31 with its defaults)."""
