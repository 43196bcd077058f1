"""What people are shown of a running job. Nothing of it is ever waited for, and nothing is decided on it.

`plane` looks once a second, tells the leader, and has the status written. `sampling` looks at this node's workers:
their status page, their last lines; `usage` at their CPU time and memory, `devices` and `amd_devices` at their GPUs,
where there are any. `slow_ranks` finds ranks that keep the others waiting. `summaries` packs what travels to the
leader, where `merging` puts it together with `_shared.job_history`: state, recoveries, events and goodput, from the
agent's records. `status_file` writes the result, a `_shared.job_view.JobStatus`. `trainer_endpoint` receives what a
Trainer tells; `train_job` tells a TrainJob of it.

`outside` connects the agent to what watches it from outside, the packages `metrics` and `traces`.

Not here: what must not be lost (failures, checkpoints), which are events and messages of rendezvous.

Imported a second after the first workers have started.

From outside, import `Pause`, `Observed`, `OpenCollective`, `StatusFile` and `Telemetry`, and when a Trainer connects
`trainer_endpoint`, inside a TrainJob `train_job`, for metrics and traces `outside`, with devices `devices` and
`amd_devices`.
"""

from muster.agent.telemetry.plane import Telemetry
from muster.agent.telemetry.sampling import Observed, OpenCollective, Pause
from muster.agent.telemetry.status_file import StatusFile

__all__ = ["Observed", "OpenCollective", "Pause", "StatusFile", "Telemetry"]
