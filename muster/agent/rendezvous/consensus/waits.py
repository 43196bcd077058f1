"""Everything that the leader waits for, and for how long. F: while it forms a round, R: while one runs, E: at the end.

| it waits for | | limit | what follows then |
| --- | --- | --- | --- |
| members to join | F | `join_timeout_s` since the last round ended; `late_join_grace_s` after a join | exit 69 |
| more members than `min` | F | `last_call_s` after the last join | a round without them |
| an acting leader's announcement | F | `announcement_wait_s` after the start | a round, or exit 69 |
| members of the last round to rejoin | F | `rejoin_wait_s`: until their leases have ended | a round without them |
| a lost member's guard to kill its workers | F | `fence_s` after the loss | a round without it |
| rounds that break again and again without a step | F | `STORM_WAIT_S`, doubled each time | a round |
| members to stop their workers | F | the longest `stop_limit_s` of them, and `stop_margin_s` | they count as lost |
| a lease of its own workers | F | `LEASE_RETRY_S`, then it is checked again | a round, or exit 69 |
| the report of a loss that explains a failure | R | `loss_wait_s` after the failure | the failure is final |
| a spare node in the place of one whose check fails | R | `spare_wait_s` after the finding | the job ends |
| more nodes that join a running job | R | `batch_s` after the last join, at most `batch_limit_s` | a round with them |
| joining nodes that import | R | `import_limit_s` after the first one is ready | a round with them |
| ranks to stop at one step for nodes that join | R | `JOIN_STOP_LIMIT_S` | they are stopped at once |
| unreachable members at the job's end | FR | `join_timeout_s` | the end |
| acknowledgements of the job's end | E | `leader.connections.ACKNOWLEDGE_SILENCES` silence limits | all exit |
| a member that is silent | FRE | the silence limit (`RendezvousConfig.silence_s`) | it is lost |

A hang ends no wait here: nodes measure `--hang-timeout` and report idleness, `failures` decides whether the job hangs.
"""

from muster._shared.records import assert_never
from muster.agent.rendezvous.consensus.state import FOREVER, Ending, Forming, JobState, RoundRunning

LEASE_RETRY_S = 0.1
"""How soon a round that the leader's lease did not cover is tried again, because heartbeats may have extended the
lease."""


def find_next_due_s(state: JobState, now_s: float) -> float:
    """Return when the next wait ends; infinity if there is none.

    The time is in the past if an event overtook a timer that is still needed. All else was decided with the event.
    """
    match state.phase:
        case Forming() as phase:
            if phase.stopping:
                return phase.stop_deadline_s
            last_s = find_join_deadline_s(state, phase)
            dues = [state.fence_until_s, state.announcement_wait_until_s, state.rejoin_wait_until_s]
            dues += [
                state.storm.wait_until_s,
                phase.end_wait_until_s,
                phase.lease_retry_s,
                state.last_join_s + state.rules.last_call_s,
            ]
        case RoundRunning() as phase:
            last_s = FOREVER if phase.loss_wait_until_s is None else phase.loss_wait_until_s
            dues = [phase.end_wait_until_s]
            if last_s == FOREVER:
                dues.append(find_batch_due_s(state, phase) if phase.drain is None else phase.drain.until_s)
        case Ending():
            return FOREVER
        case _:
            assert_never(state.phase)
    return min([last_s, *(due for due in dues if due > now_s)])


def find_join_deadline_s(state: JobState, phase: Forming) -> float:
    """Return when rendezvous fails. A node that joins just before the timeout gets `late_join_grace_s`."""
    if phase.final is not None:
        return FOREVER
    timeout_s = phase.since_s + state.rules.join_timeout_s
    return max(
        timeout_s, state.fence_until_s, state.storm.wait_until_s, state.last_join_s + state.rules.late_join_grace_s
    )


def find_batch_due_s(state: JobState, phase: RoundRunning) -> float:
    """Return when the running round is broken for members that joined it; infinity if there are none."""
    if phase.batch_since_s is None:
        return FOREVER
    importing = 0 if state.importing_in_round else len(state.importing)
    if len(state.members) - importing >= state.rules.max_nodes:
        return phase.batch_since_s  # the job is full
    if importing:
        return phase.batch_since_s + state.rules.import_limit_s
    return min(state.last_join_s + state.rules.batch_s, phase.batch_since_s + state.rules.batch_limit_s)
