"""What to change in a script or a command line, each with the line of the documentation that helps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One thing to change."""

    text: str
    page: str
    """`docs/NAME.md#HEADING`."""


ADVICE: Final[Mapping[str, Advice]] = {
    "resume": Advice(
        text="the script starts with its first step again: load the last checkpoint at the start "
        "(worker.resume_path() names it), and continue with the step after it",
        page="docs/preemption.md#how-to-resume",
    ),
    "saved": Advice(
        text="a checkpoint counts only if all ranks report it, and only some do: let every rank save its own part, "
        "and call worker.saved at the same step",
        page="docs/preemption.md#how-to-resume",
    ),
    "atomic": Advice(
        text="what was saved cannot be read after the fault: write a checkpoint beside the last one, then rename it "
        "(os.replace), so that a kill at any moment leaves a complete one",
        page="docs/rehearse.md#a-checkpoint-that-is-not-atomic",
    ),
    "stop": Advice(
        text="the ranks could not stop at one step: every rank must call worker.should_stop at the same "
        "steps, and only some do",
        page="docs/preemption.md#the-loop",
    ),
    "data": Advice(
        text="after the restart the script computes something else: save and load what decides its data (the sampler's "
        "or loader's position, the random states), or derive it from the step",
        page="docs/preemption.md#what-the-checkpoint-must-withstand",
    ),
    "retries": Advice(
        text="all retries were used: raise --max_retries",
        page="docs/verdicts.md#verdicts",
    ),
    "hang": Advice(
        text="the job stood still until the rehearsal ended it: set --hang_timeout, so that its ranks start again",
        page="docs/hangs.md#options",
    ),
    "failed": Advice(
        text="the job did not survive: its report names the rank and the line",
        page="docs/verdicts.md#classes",
    ),
}
