"""What people see of a running job. Nothing ever waits for it, and nothing is decided on it.

`plane` looks once a second, reports to the leader, and has the status written. `sampling` looks at this node's workers:
their status page, last lines, CPU time and memory, and packs what travels to the leader. `devices` looks at their GPUs,
if there are any. `slow_ranks` finds ranks that block the others. At the leader `merging` combines it with
`_shared.job_history`: state, recoveries, events and goodput, from the agent's records. The result is a
`_shared.job_view.JobStatus`.

Not here: what must not be lost (failures, checkpoints), which are events and messages of rendezvous.

Imported a second after the first workers have started.

From outside, import `Pause`, `Observed`, `OpenCollective`, `StatusFile` and `Telemetry`. Import
`devices` if there are devices.
"""

from muster.agent.telemetry.plane import StatusFile, Telemetry
from muster.agent.telemetry.sampling import Observed, OpenCollective, Pause

__all__ = ["Observed", "OpenCollective", "Pause", "StatusFile", "Telemetry"]
