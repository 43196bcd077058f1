"""local_cwd and detached: replicas as processes of this machine, in the current working directory.

`scheduler` is what TorchX calls. `request` turns an AppDef into what will be run (pure, the dry run), `devices` shares
GPUs out, `interpreter` finds the Python that runs the agents. `driver` runs replicas for the supervisor,
`replica_process` starts one that dies with the supervisor, `capture` writes output, `logs` reads it.

Logs and state stay in `~/.local/state/muster` (or $XDG_STATE_HOME/muster, or `log_dir`) until `torchx delete` removes
an app or the folder is removed by hand: nothing there is needed by an app that has ended.
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
