"""Whether a failed job may be started again: `--max-restarts`, and start-up failures that repeat. Pure.

An attempt is counted when the next round is formed (`formation`) and refunded when a lost node explains the failure
(`failures.refund_attempt`).
"""

from muster.agent.diagnosis.report import Failure
from muster.agent.diagnosis.root_cause import describe_failure, find_signature


def find_final_reason(
    root: Failure | None, startup_signature: str | None, attempt: int, max_restarts: int
) -> str | None:
    """Explain in one line that a failure ends the job; None when another attempt follows.

    Args:
        root: the root cause.
        startup_signature: of the start-up failure that ended the previous attempt.
        attempt: how many restarts have been used.
        max_restarts: how many are allowed.
    """
    signature = find_signature(root)
    if signature is not None and signature == startup_signature:
        return f"{describe_failure(root)}; it failed the same way right after the start twice in a row: not retried"
    if attempt >= max_restarts:
        used = f"all {max_restarts} restarts are used" if max_restarts else "no restarts are allowed (--max-restarts 0)"
        return f"{describe_failure(root)}; {used}"
    return None
