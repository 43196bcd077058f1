"""`held` and `local_held`: runs on nodes that `muster hold` keeps. `local_held` apps end with their command.

A run is an app of its own, with a supervisor as any app of `local_cwd`. Where `local_cwd` starts an agent, a run starts
`muster/agent/hold/client.py`, which passes what it was started with to an agent that waits on the node. On a hold of
another adapter it starts a `link`, which reaches the node through that adapter. There `node_program.held_run`, which
travels with the workspace, does the same.

    scheduler   what TorchX calls
    holds       which holds there are, of all adapters; those of this machine are in `muster.schedulers.local.holds`.
                `muster.elastic` uses `lend_node`
    remote      the `-cfg` options, and what a run on a hold of another adapter is
    driver      what the supervisor loads, and `link`, what it starts for a node elsewhere
"""

from dataclasses import replace
from typing import Final

from muster.schedulers.adapter.properties import Factory, Properties

_ON_HOLDS: Final = "-s {} runs jobs on a hold: name the scheduler whose nodes to hold, such as -s local_cwd"

create_scheduler: Final = Factory(
    name="held",
    creates="muster.schedulers.held.scheduler:HeldScheduler",
    properties=Properties(run_options={"detach": "false"}, refuses_hold=_ON_HOLDS.format("held")),
    needs_linux=True,
)
create_attached_scheduler: Final = replace(
    create_scheduler,
    name="local_held",
    properties=replace(
        create_scheduler.properties, waits=True, same_apps_as="held", refuses_hold=_ON_HOLDS.format("local_held")
    ),
)
"""The same scheduler. TorchX waits for every scheduler whose name begins with `local`."""
