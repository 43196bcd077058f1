"""Which ranks a hang is blamed on, in the order of its failures and in the first line of the report."""

from doubles.samples import make_failure

from muster._shared.records import replace
from muster._shared.reports import ENDED, Collective, FinalFailure, Group, RankView, Report, Stack
from muster.agent.diagnosis.report_text import format_report
from muster.agent.diagnosis.root_cause import DatedFailure, build_report, choose_root, describe_failure

TORCH = '  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 9 in {op}\n'
TORCH += '  File "/x/site-packages/torch/distributed/c10d_logger.py", line 8 in wrapper\n'


def stack(rank: int, line: int, op: str = "") -> Stack:
    inner = TORCH.format(op=op) if op else ""
    text = f'Thread 0x2 (most recent call first):\n  File "/w/log.py", line 1 in f\n\nCurrent thread 0x1:\n{inner}'
    return Stack(global_rank=rank, node=0, local_rank=rank, text=f'{text}  File "/w/main.py", line {line} in <module>')


def hang(*stacks: Stack, ranks: tuple[int, ...] = (), reason: str = "nothing written for 4 s") -> Report:
    """The report of a job that may not restart, as the leader builds it."""
    seen = []
    for rank in ranks or [each.global_rank for each in stacks]:
        when_s = 10.0 + rank / 10
        idle = {"exit_code": None, "hung": True, "reason": f"{reason}", "time_s": when_s}
        seen.append(DatedFailure(when_s=when_s, failure=make_failure(local_rank=rank, global_rank=rank, **idle)))
    root = choose_root(seen)
    final = FinalFailure(cause=describe_failure(root), global_rank=root and root.global_rank, verdict="no restart")
    return build_report("job", final, 0, 0, seen, stacks)


def test_in_a_hang_the_rank_that_is_not_in_the_collective_comes_first() -> None:
    made = hang(stack(0, 7, "all_reduce"), stack(1, 6), stack(2, 7, "all_reduce"))
    assert [(failure.global_rank, failure.collateral) for failure in made.failures] == [
        (1, False),
        (0, True),
        (2, True),
    ]
    assert made.reason == (
        "rank 1 did not enter all_reduce (main.py:7), where ranks 0, 2 wait; last seen at main.py:6; "
        "hung: nothing written for 4 s; no restart"
    )


def test_in_a_hang_a_rank_that_waits_for_its_data_says_so() -> None:
    loading = stack(1, 6)
    frame = '  File "/x/site-packages/torch/utils/data/dataloader.py", line 725 in __next__\n'
    loading = Stack(
        global_rank=1, node=0, local_rank=1, text=loading.text.replace('  File "/w/main', f'{frame}  File "/w/main')
    )
    assert hang(stack(0, 7, "all_reduce"), loading).reason.startswith(
        "rank 1 did not enter all_reduce (main.py:7), where rank 0 waits; "
        "last seen at main.py:6, waiting for its DataLoader; hung: "
    )


def test_in_a_hang_who_does_not_answer_a_peer_has_not_entered_the_same_call() -> None:
    made = hang(stack(0, 7, "recv"), stack(1, 6))
    assert made.reason.startswith(
        "rank 1 is elsewhere while rank 0 waits in recv (main.py:7); last seen at main.py:6; "
    )


def test_in_a_hang_the_rank_that_has_ended_is_no_failure_and_named_all_the_same() -> None:
    waits = Collective(number=6, operation="all_reduce", sizes="4 x float32", age_s=4.0, is_done=False)
    own = Group(name="0", description="default_pg", entered=6, completed=5, ranks=(0, 1), entries=(waits,))
    view = RankView(global_rank=0, node=0, host="h", is_answering=True, has_server=True, groups=(own,))
    gone = RankView(global_rank=1, node=0, host="h", state=ENDED)
    stacks = (
        replace(stack(0, 7, "all_reduce"), view=view),
        Stack(global_rank=1, node=0, local_rank=1, text="", view=gone),
    )
    made = hang(*stacks, ranks=(0,), reason="no collective and no step for 4 s")
    assert made.reason.startswith(
        "rank 0 hung: rank 1 has ended; rank 0 has waited in all_reduce #6 of default_pg (4 x float32) for 4 s; "
        "no collective and no step for 4 s; "
    )
    assert "\nHung\n" in format_report(made)


def test_in_a_hang_the_ranks_in_another_collective_come_first() -> None:
    made = hang(stack(0, 7, "all_reduce"), stack(1, 6, "barrier"), stack(2, 7, "all_reduce"))
    assert made.reason.startswith("rank 1 hung in barrier (main.py:6), not in all_reduce (main.py:7), where ranks 0, 2")
    assert made.failures[0].global_rank == 1


def test_stacks_that_show_no_difference_blame_no_rank() -> None:
    for stacks in (
        [stack(rank, 7, "all_reduce") for rank in range(3)],
        [stack(rank, 7) for rank in range(3)],
        [stack(0, 7, "all_reduce"), stack(1, 6, "barrier")],
    ):
        made = hang(*stacks)
        ranks = "ranks 0-1" if len(stacks) == 2 else "ranks 0-2"
        assert made.reason.startswith(f"{ranks} hung: nothing written for 4 s; no restart"), made.reason
        assert not any(failure.collateral for failure in made.failures)
