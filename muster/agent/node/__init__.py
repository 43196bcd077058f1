"""One node of the job: what the agent does about each event (a worker's end, a signal, a broken round).

`decisions.decide` is pure: state and event in, new state and actions out. `worker_decisions` is its part about one
round's workers: starts, failures, and stops with their grace period. (Whether a failure ends the round is decided in
`rendezvous.consensus.failures`.) `drain_decisions` is its part about stopping all ranks of the job at one step.
`request_decisions` is its part about requests of people, including Ctrl-C. `events`, `actions` and `state` are its
data.

`supervisor` passes events to it and carries out its actions. `round_workers` carries out the actions on workers, and
starts and ends the round's store if this node hosts it. `round_parts` calls the parts of features (`agent.features`).
`evidence` reads why workers failed, and their stacks.
`transition_log` records what happens, and `outcome` reports how the job ended.

Not here: how workers are started (`workers`), what nodes agree on (`rendezvous`).

From outside, import `supervisor.Supervisor` and `round_workers.AgentParts`; for features `round_parts`, `events`,
`actions` and `outcome`.
"""
