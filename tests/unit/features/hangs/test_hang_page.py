"""What is said of a job that is looked at while it runs: of one that hangs, and of one that does not."""

import re

from muster._shared.records import replace
from muster._shared.reports import ENDED, Collective, Group, RankProgress, RankView, Stack
from muster.agent.features.hangs.judge import Judge
from muster.agent.features.hangs.samples import Reported, WorkerSample, compare
from muster.agent.features.hangs.sessions import Reading
from muster.agent.workers.status_page import SlotStatus

SIXTH = "all_reduce #6 of default_pg (4 x float32)"
IN_TORCH = """\
Current thread 0x1 (most recent call first):
  File "/lib/torch/distributed/distributed_c10d.py", line 9 in {operation}
  File "/w/main.py", line 15 in main"""
IN_PROGRAM = """\
Current thread 0x1 (most recent call first):
  File "/w/main.py", line 9 in main"""


def view(rank: int, entered: int, *, completed: int = 5, age_s: float = 60.0) -> RankView:
    entries = tuple(
        Collective(number=number, operation="all_reduce", sizes="4 x float32", age_s=age_s, is_done=number <= completed)
        for number in range(5, entered + 1)
    )
    group = Group(name="0", description="default_pg", entered=entered, completed=completed, entries=entries)
    return RankView(global_rank=rank, node=0, host="a", is_answering=True, has_server=True, groups=(group,))


def stack(seen: RankView, progress: RankProgress | None = None, text: str = "") -> Stack:
    rank = seen.global_rank
    return Stack(global_rank=rank, node=0, local_rank=rank, text=text, view=seen, progress=progress)


def still(rank: int, still_s: float | None = 60.0, **rest: object) -> RankProgress:
    return replace(RankProgress(global_rank=rank, still_s=still_s), **rest)


def test_a_rank_that_has_ended_is_named_by_those_that_wait_for_it() -> None:
    waits, gone = view(0, 6), RankView(global_rank=1, node=1, host="b", state=ENDED)
    waits = replace(waits, groups=(replace(waits.groups[0], ranks=(0, 1)),))
    [line] = Judge().describe_hang((stack(waits), stack(gone)))
    assert line.startswith("rank 1 (node 1, b)")
    assert ("has ended; " in line, f" in {SIXTH} for 60 s" in line) == (True, True)


GUILTY = "rank 1 (node 0, a)"
STEPPING = {"step": 812, "total": 1000, "rate": 7.9, "moved": ""}


def test_the_guilty_rank_of_a_job_that_stands_still_is_named_with_the_steps() -> None:
    shown = {"step": 214, "total": 1000, "values": (("loss", "0.31"),)}
    stacks = (stack(view(0, 6), still(0, **shown)), stack(view(1, 5), still(1, **shown)))
    named, steps = Judge().describe_ranks(stacks)
    assert named.startswith(GUILTY)
    assert re.findall(r"[\d.-]+", steps) == ["0-1", "214", "1000", "0.31"]


def test_of_a_job_that_moves_nobody_is_accused() -> None:
    """Rank 0 has just entered what rank 1 has not; or all have, and nobody has completed it yet."""
    for entered in (5, 6):
        stacks = (
            stack(view(0, 6, age_s=0.2), still(0, 0.2, **STEPPING)),
            stack(view(1, entered, age_s=0.2), still(1, 0.2, **{**STEPPING, "step": 813})),
        )
        assert [re.findall(r"[\d.]+", line) for line in Judge().describe_ranks(stacks)] == [["812", "1000", "7.9"]]


def test_a_job_without_steps_says_which_collective_has_moved() -> None:
    moved = "all_reduce #12 of default_pg, 3.0 a second"
    [line] = Judge().describe_ranks([stack(view(0, 5), still(0)), stack(view(1, 6), still(1, moved=moved))])
    assert line.endswith(f": {moved}")


def test_what_is_younger_than_some_seconds_is_no_verdict() -> None:
    stacks = (stack(view(0, 6, age_s=3.0), still(0, 3.0)), stack(view(1, 5, age_s=3.0), still(1, 3.0)))
    [line] = Judge().describe_ranks(stacks)
    assert " 3 s " in line


def test_a_rank_that_moves_in_a_group_of_its_own_hides_no_hang() -> None:
    stacks = (stack(view(0, 6), still(0)), stack(view(1, 5), still(1)), stack(view(2, 6), still(2, moved="")))
    assert not any(
        line.startswith(GUILTY) for line in Judge().describe_ranks(stacks)
    )  # rank 2 waits in the same collective, as far as the look shows: it has moved since
    apart = RankView(global_rank=2, node=0, host="a", is_answering=True, has_server=True)
    [line] = Judge().describe_ranks((*stacks[:2], stack(apart, still(2, moved=""))))
    assert line.startswith(GUILTY)


def test_a_rank_that_computes_while_others_wait_is_said_to_do_so() -> None:
    stacks = (stack(view(0, 6), still(0)), stack(view(1, 5), still(1, is_busy=True)))
    (line,) = Judge().describe_ranks(stacks)
    assert "; rank 1 works (" in line


def test_by_stacks_alone_a_rank_is_named_only_if_it_does_nothing() -> None:
    """A forward pass is no hang: it computes, or has just sent something."""
    waits = IN_TORCH.format(operation="recv")
    for progress, expected in (
        (still(1), "rank 1 (node 0, a) is elsewhere while rank 0 waits in recv (main.py:15); last seen at main.py:9"),
        (still(1, is_busy=True), "no verdict: rank 1 works (CPU time, reads or writes); ask again in a few seconds"),
        (still(1, 2.0), "no verdict: the last sign of life is 2 s old; ask again in a few seconds"),
        (still(1, moved=""), "the job makes progress"),
    ):
        stacks = (stack(view(0, 5), still(0), waits), stack(view(1, 5), progress, IN_PROGRAM))
        assert list(Judge().describe_ranks(stacks)) == [expected]


def test_a_hang_that_the_watch_has_found_needs_no_second_look() -> None:
    stacks = (stack(view(0, 6), still(0, 1.0)), stack(view(1, 5), still(1, 1.0, is_busy=True)))
    (line,) = Judge().describe_hang(stacks)
    assert line.startswith(GUILTY)


SLOT = SlotStatus(1, 10, 100, "", 5, None, None, (), (), ())


def look(at_s: float, seen: RankView, cpu_s: float) -> WorkerSample:
    return WorkerSample(at_s=at_s, view=seen, processes={(7, 1): Reading(cpu_s=cpu_s, written_bytes=0)})


def test_what_has_moved_between_two_looks() -> None:
    reported = tuple(
        Reported(at_s=at_s, slot=SLOT._replace(step=step, changed_ns=step), values={"loss": 0.25})
        for at_s, step in ((100.0, 10), (102.0, 14))
    )
    found = compare((look(100.0, view(0, 6), 1.0), look(101.0, view(0, 10, completed=9), 1.5)), reported)
    assert (found.step, found.total, found.rate, found.values) == (14, 100, 2.0, (("loss", "0.25"),))
    assert (found.moved, found.is_busy) == ("all_reduce #10 of default_pg, 4.0 a second", True)
    same = compare((look(100.0, view(0, 6), 1.0), look(101.0, view(0, 6), 1.0)), None)
    assert (same.step, same.moved, same.is_busy, same.still_s) == (None, None, False, 60.0)


def test_a_worker_that_did_not_answer_the_second_look_has_not_moved() -> None:
    silent = replace(view(0, 6), is_answering=False, groups=())
    assert compare((look(100.0, view(0, 6), 1.0), look(101.0, silent, 1.0)), None).moved is None
