"""local_cwd and detached: replicas are processes of this machine, in the current working directory.

TorchX calls `scheduler`. `options` holds the `-cfg` options. `submission`, which only a submission loads, builds the
app's spec by `request`. `request` turns an AppDef into what will run (pure, the dry run). `interpreter` finds the
Python that runs the agents. The rest is what any adapter that starts
processes has: `muster.schedulers.processes` and `adapter.process_scheduler`.

`holds` finds what `muster hold` keeps on this machine, for that command, for `muster list` and for the scheduler
`held`. `hold_lock` says which run has a hold.

Logs and state stay in `~/.local/state/muster` (or $XDG_STATE_HOME/muster, or `log_dir`) until `muster delete` removes
an app or a user removes the folder by hand. An app that has ended needs nothing there.
"""

from typing import Any

from muster._shared.processes import LINUX


def create_scheduler(session_name: str, **kwargs: Any) -> Any:
    """Return TorchX's factory for `local_cwd`. It ignores the other arguments, which TorchX passes to all factories.

    On systems other than Linux it returns TorchX's own scheduler: ours needs pidfd, subreapers and epoll.
    """
    if not LINUX:
        from torchx.schedulers.local_scheduler import create_scheduler as create_theirs

        return create_theirs(session_name, **kwargs)
    from muster.schedulers.local.scheduler import LocalScheduler

    return LocalScheduler("local_cwd", session_name)


def create_detached_scheduler(session_name: str, **kwargs: Any) -> Any:
    """Return the same scheduler as `detached`: TorchX waits for every scheduler whose name begins with `local`.

    Raises:
        PlatformError: this system is not Linux.
    """
    del kwargs
    from muster.schedulers.runner.platforms import require_linux

    require_linux("detached")
    from muster.schedulers.local.scheduler import LocalScheduler

    return LocalScheduler("detached", session_name)
