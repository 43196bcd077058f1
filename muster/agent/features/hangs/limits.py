"""Learns from a job's own pauses how long it may pause, for `--hang-timeout auto`. Pure; new for each attempt.

A pause is a time in which no rank of the node enters or completes a collective or does a step. A pause is quiet while
no worker uses CPU time or writes anything either. Then the margin is smaller, because a long evaluation or a
compilation is not quiet. Pauses are learned by the phase that workers name with `muster.worker.phase`, because an
evaluation or a checkpoint may take longer than a step. Until a phase is known, its limits are wide, but below NCCL's
own timeout of 600 s, after which torch ends the process.

A rank that waits in a collective counts as hung before torch ends it, whatever was learned, and also with a limit in
seconds.
"""

from muster._shared.records import record
from muster.agent.runtime.limits import HANG_LEAST_S, HANG_NAMED_BUSY_S, HANG_UNKNOWN_S

FACTOR = 5.0
"""A limit is this many times the longest pause. NVRx has the same margin."""
WARM_UP = 5
"""Looks at an active job after which its steps are known, because the first ones compile."""


@record
class Limits:
    """Limits in seconds."""

    quiet_s: float
    busy_s: float


class LearnedLimits:
    """Learns from each look at a node's workers, and says when they count as hung."""

    def __init__(self) -> None:
        self._looks: dict[str, int] = {}
        """Looks at an active job, by phase."""
        self._quiet_s: dict[str, float] = {}
        self._busy_s: dict[str, float] = {}
        """The longest pauses, by phase."""

    def record_active(self, phase: str, *, pause_s: float, quiet_s: float) -> None:
        """Record that the workers are active after a pause.

        Args:
            phase: the phase of the pause; "" if none was named.
            pause_s: how long it was.
            quiet_s: its longest quiet part.
        """
        self._looks[phase] = self._looks.get(phase, 0) + 1
        self._busy_s[phase] = max(self._busy_s.get(phase, 0.0), pause_s)
        self._quiet_s[phase] = max(self._quiet_s.get(phase, 0.0), quiet_s)

    def find(self, phase: str) -> Limits:
        """Return the limits for a pause in this phase."""
        least_busy_s = HANG_NAMED_BUSY_S if phase else HANG_UNKNOWN_S
        is_known = self._looks.get(phase, 0) >= (1 if phase else WARM_UP)
        if not is_known:
            return Limits(quiet_s=HANG_UNKNOWN_S, busy_s=least_busy_s)
        return Limits(
            quiet_s=max(HANG_LEAST_S, FACTOR * self._quiet_s[phase]),
            busy_s=max(least_busy_s, FACTOR * self._busy_s[phase]),
        )

    def describe(self, phase: str) -> str:
        """Return what was learned: "the longest pause before was 2 s"."""
        if phase not in self._busy_s:
            return "no step is known yet" if not phase else f"phase {phase!r} is not known yet"
        of = f" of phase {phase!r}" if phase else ""
        return f"the longest pause{of} before was {self._busy_s[phase]:.0f} s"
