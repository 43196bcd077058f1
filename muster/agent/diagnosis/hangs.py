"""What is said of workers that hang, or that are looked at while they run. Pure.

Who blocks the others is said by the feature that reads what workers wait in, see `agent.features`. Without it, no rank
is named. When a job counts as hung is decided in `rendezvous.consensus.failures`.
"""

from collections.abc import Iterable, Iterator, Sequence

from muster._shared.records import record
from muster._shared.reports import Failure, RankProgress, Stack
from muster.agent.features import PARTS, load_module

_MOST_NAMED = 64


@record
class HangCause:
    """The ranks that block the others. Empty: none is known to."""

    ranks: frozenset[int] = frozenset()
    clause: str = ""
    """Follows their name: "did not enter all_reduce (main.py:7), where ranks 0, 2 wait; last seen at x.py:6"."""
    line: str = ""
    """Says the same with their name."""

    @property
    def named(self) -> tuple[int, ...]:
        """The ranks, as far as a record has room for them."""
        return tuple(sorted(self.ranks)[:_MOST_NAMED])


class HangJudge:
    """Judges what the ranks of a job wait for, from the stacks of all that are known. What it can say, it overrides."""

    def find_cause(self, stacks: Sequence[Stack]) -> HangCause:
        """Find the ranks that blocked the others in a hang that has ended the round."""
        del stacks
        return HangCause()

    def describe_hang(self, stacks: Sequence[Stack]) -> Iterable[str]:
        """Return lines about a hang with which the job continues."""
        del stacks
        return ()

    def describe_ranks(self, stacks: Sequence[Stack]) -> Iterable[str]:
        """Return lines about a job that someone looks at: who blocks the others, or how far the ranks are."""
        del stacks
        return ()

    def describe_standstill(self, stacks: Sequence[Stack], for_s: float) -> str | None:
        """Return the line about a job that has stood still for `for_s`; None if it has not, or nothing is known."""
        del stacks, for_s
        return None


def load_judge() -> HangJudge:
    """Return the judge that this agent has."""
    for row in PARTS:
        if row.reads_views:
            judge: HangJudge = load_module(row.name, "judge").Judge()
            return judge
    return HangJudge()


def describe_hang(idle: Iterable[Failure], stacks: Sequence[Stack]) -> Iterator[str]:
    """Describe a hang with which the job continues: what the ranks have not done, and why.

    Args:
        idle: the failures that would be recorded if the hang were one.
        stacks: those of all known ranks.
    """
    for failure in idle:
        yield f"the job hangs: {failure.reason}"
        break
    yield from load_judge().describe_hang(stacks)


def list_progress(stacks: Iterable[Stack]) -> tuple[RankProgress, ...]:
    """Return the progress of the ranks that were looked at twice, by rank."""
    found = (stack.progress for stack in stacks if stack.progress is not None)
    return tuple(sorted(found, key=lambda each: each.global_rank))
