"""local_cwd and detached: replicas are processes of this machine, in the current working directory.

TorchX calls `scheduler`. `options` holds the `-cfg` options. `submission`, which only a submission loads, builds the
app's spec by `request`, and finds the Python that runs the agents. `request` turns an AppDef into what will run (pure,
the dry run). The rest is what any adapter that starts processes has: `muster.schedulers.processes` and
`adapter.process_scheduler`.

`holds` finds what `muster hold` keeps on this machine, for that command, for `muster list` and for the scheduler
`held`. `hold_lock` says which run has a hold.

Logs and state stay in `~/.local/state/muster` (or $XDG_STATE_HOME/muster, or `log_dir`) until `muster delete` removes
an app or a user removes the folder by hand. An app that has ended needs nothing there.
"""

from typing import Final

from muster.schedulers.adapter.properties import Factory, Properties

_SCHEDULER: Final = "muster.schedulers.local.scheduler:LocalScheduler"

create_scheduler: Final = Factory(
    name="local_cwd",
    creates=_SCHEDULER,
    properties=Properties(waits=True, has_holders_here=True),
    elsewhere="torchx.schedulers.local_scheduler:create_scheduler",
)
"""On other systems than Linux it is TorchX's own scheduler: ours needs pidfd, subreapers and epoll."""
create_detached_scheduler: Final = Factory(
    name="detached",
    creates=_SCHEDULER,
    properties=Properties(
        has_holders_here=True, refuses_hold="detached and local_cwd have the same nodes: hold them with -s local_cwd"
    ),
    needs_linux=True,
)
"""The same scheduler. TorchX waits for every scheduler whose name begins with `local`."""
