"""Whether a failed job may be started again: `--max-restarts`, and start-up failures that repeat. Pure.

An attempt is counted when the next round is formed (`formation`) and refunded when a lost node explains the failure
(`failures.refund_attempt`).
"""

from muster._shared.reports import Failure, FinalFailure
from muster.agent.diagnosis.root_cause import describe_failure, find_signature


def find_final_failure(
    root: Failure | None,
    startup_signature: str | None,
    attempt: int,
    max_restarts: int,
    flag: str = "--max-restarts",
    *,
    stops_on_hang: bool = False,
) -> FinalFailure | None:
    """Explain why a failure ends the job; None when another attempt follows.

    Args:
        root: the root cause.
        startup_signature: of the start-up failure that ended the previous attempt.
        attempt: how many restarts have been used.
        max_restarts: how many are allowed.
        flag: what the user calls this limit.
        stops_on_hang: no attempt follows on a hang (--hang-action stop).
    """
    signature = find_signature(root)
    if signature is not None and signature == startup_signature:
        verdict = "it failed the same way right after the start twice in a row: not retried"
    elif stops_on_hang and root is not None and root.hung:
        verdict = "a hang ends the job (--hang-action stop)"
    elif attempt < max_restarts:
        return None
    elif max_restarts:
        verdict = f"all {max_restarts} restarts are used"
    else:
        verdict = f"no restarts are allowed ({flag} 0)"
    global_rank = None if root is None else root.global_rank
    return FinalFailure(cause=describe_failure(root), global_rank=global_rank, verdict=verdict)
