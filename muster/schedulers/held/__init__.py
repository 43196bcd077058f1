"""`held` and `local_held`: runs on nodes that `muster hold` keeps. `local_held` apps end with their command.

A run is an app of its own, with a supervisor as any app of `local_cwd`. Where `local_cwd` starts an agent, a run starts
`muster/agent/hold/client.py`, which passes what it was started with to an agent that waits on the node. On a hold of
another adapter it starts a `link`, which reaches the node through that adapter. There `node`, a program that travels as
a text, with the workspace, does the same.

    options     the `-cfg` options
    scheduler   what TorchX calls
    holds       which holds there are, of all adapters; those of this machine are in `muster.schedulers.local.holds`
    remote      what a run on a hold of another adapter is
    driver      what the supervisor loads; `link_names` is what it has in common with its links and the scheduler
    lending     what `muster.elastic` uses
"""

from typing import Any


def create_scheduler(session_name: str, **kwargs: Any) -> Any:
    """Return TorchX's factory for `held`. It ignores the other arguments, which TorchX passes to all factories.

    Raises:
        PlatformError: this system is not Linux.
    """
    del kwargs
    return _create("held", session_name)


def create_attached_scheduler(session_name: str, **kwargs: Any) -> Any:
    """Return the same scheduler as `local_held`: TorchX waits for every scheduler whose name begins with `local`.

    Raises:
        PlatformError: this system is not Linux.
    """
    del kwargs
    return _create("local_held", session_name)


def _create(name: str, session_name: str) -> Any:
    from muster.schedulers.runner.platforms import require_linux

    require_linux(name)
    from muster.schedulers.held.scheduler import HeldScheduler

    return HeldScheduler(name, session_name)
