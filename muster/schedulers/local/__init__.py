"""local_cwd and detached: replicas as processes of this machine, in the current working directory.

    request.py      AppDef -> request: pure, the dry run      scheduler.py  what TorchX calls
    devices.py      which GPUs for whom                       driver.py     replicas for the supervisor
    interpreter.py  which Python runs the agents              spawn.py      one process that dies with us
    logs.py         reading output                            capture.py    writing it, in true order

Logs and state stay in `~/.local/state/muster` (or $XDG_STATE_HOME/muster, or `log_dir`) until `torchx delete` removes
an app, or somebody removes the folder: nothing there is needed by an app that has ended.
"""

from typing import Any

from muster._processes import LINUX


def create_scheduler(session_name: str, **kwargs: Any) -> Any:
    """TorchX's factory for `local_cwd`. What TorchX passes to all factories besides the session is not for us.

    Elsewhere than on Linux it is TorchX's own scheduler, with its faults: ours needs pidfd, subreapers and epoll.
    """
    if not LINUX:
        from torchx.schedulers.local_scheduler import create_scheduler as create_theirs

        return create_theirs(session_name, **kwargs)
    from muster.schedulers.local.scheduler import LocalScheduler

    return LocalScheduler("local_cwd", session_name)


def create_detached_scheduler(session_name: str, **kwargs: Any) -> Any:
    """The same scheduler as `detached`: TorchX waits for every scheduler whose name begins with `local`.

    Raises:
        ModuleNotFoundError: not on Linux; of which `torchx runopts` makes a line.
    """
    del kwargs
    if not LINUX:
        raise ModuleNotFoundError("the scheduler `detached` needs Linux")
    from muster.schedulers.local.scheduler import LocalScheduler

    return LocalScheduler("detached", session_name)
