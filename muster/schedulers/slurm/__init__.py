"""Slurm: an AppDef becomes one batch job, whose script only starts one task per node with `srun`.

    options       the options of `-cfg`
    request       from an AppDef to a spec and a script: pure, the dry run. It also packs the zip that each node runs
    client        calls Slurm's commands, and reads their fixed formats
    reasons       what Slurm's states and reasons mean for an app
    running_apps  what is known of an app: its queue entry, and what its nodes have recorded
    logs          logs and files of nodes that share no folder with this machine
    scheduler     what TorchX and the command `muster` call

    hosts         node lists and times; it travels in the zip
    node          what runs on a node, from the zip, standard library only: a `supervision.supervisor.Supervisor` of one
                  replica, with the driver of processes

TorchX's own adapter is `slurm_torchx`.
"""

from typing import Final

from muster.schedulers.adapter.properties import Factory, Properties

create_scheduler: Final = Factory(
    name="slurm",
    creates="muster.schedulers.slurm.scheduler:SlurmScheduler",
    # What squeue shows names an app. A hold ends with its allocation.
    properties=Properties(own_names=r"\d+", hold_options={"continues": "no"}),
)
