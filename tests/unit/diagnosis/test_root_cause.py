"""Whose failure it was, and what the report's first line says of it."""

import pytest
from doubles.samples import make_failure

from muster._shared import causes
from muster._shared.codec import decode, to_data
from muster._shared.records import replace
from muster._shared.reports import ENDED, FinalFailure, OomEvidence, RankView, Report, Stack
from muster.agent.diagnosis.root_cause import DatedFailure, add_early_exits, build_report, choose_root, describe_failure
from muster.agent.diagnosis.tracebacks import put_program_first
from muster.agent.rendezvous.restarts import Restarts
from muster.agent.rendezvous.verdicts import VerdictRules, decide_verdict


def see(when_s: float, global_rank: int, **changes) -> DatedFailure:
    failure = make_failure(
        local_rank=global_rank, global_rank=global_rank, time_s=when_s, **{"exit_code": 2, **changes}
    )
    return DatedFailure(when_s=when_s, failure=failure)


def find_final_failure(root, flag="--max-restarts"):
    return decide_verdict(root, Restarts(), 0, VerdictRules(flag=flag)).final


def report(final, *seen, stacks=()):
    return build_report("job", final, 0, 0, seen, stacks)


def build(*seen, stacks=()):
    """The report of a job that may not restart, as the leader builds it."""
    final = find_final_failure(choose_root(seen))
    return report(final, *seen, stacks=stacks)


def test_the_limit_has_the_name_that_the_user_gave_it() -> None:
    final = find_final_failure(choose_root([see(1.0, 0)]), "--max_retries")
    assert final.verdict == "no restarts are allowed (--max_retries 0)"


def test_the_first_line_names_the_root_cause_as_known_at_the_end() -> None:
    heard_first, failed_first, victim = see(10.01, 0), see(10.0, 1), see(9.0, 2, stopped_by_us=True)
    final = find_final_failure(choose_root([heard_first]))
    assert final.describe().startswith("rank 0 ")
    made = report(final, heard_first, failed_first, victim)
    assert [failure.global_rank for failure in made.failures] == [1, 0, 2]
    assert (
        made.reason
        == "ranks 0-1 failed in the same way: exited with code 2; no restarts are allowed (--max-restarts 0)"
    )


def test_a_cause_that_is_no_known_failure_stays() -> None:
    """After a takeover the new leader may know only failures that the root cause has caused."""
    assert report(FinalFailure(cause="the nodes came apart"), see(1.0, 0)).reason == "the nodes came apart"
    elsewhere = FinalFailure(cause="rank 0 failed", global_rank=0, verdict="why")
    assert report(elsewhere, see(1.0, 1)).reason == "rank 0 failed; why"
    none = find_final_failure(None)
    ended = see(1.0, 0, stopped_by_us=True)
    assert report(none, ended).reason == "a worker failed; no restarts are allowed (--max-restarts 0)"


def test_ranks_with_the_same_exception_failed_in_the_same_way() -> None:
    """Also one that muster's signal ended after it had raised; numbers in the text may differ."""
    made = build(
        see(10.0, 1, exit_code=1, exception="RuntimeError: GPU 1 is lost"),
        see(10.9, 0, exit_code=None, signal="SIGTERM", stopped_by_us=True, exception="RuntimeError: GPU 0 is lost"),
        see(11.0, 2, exit_code=1, exception="KeyError: 'lr'"),
        see(11.0, 3, exit_code=None, signal="SIGTERM", stopped_by_us=True),
    )
    assert made.reason.startswith("ranks 0-1 failed in the same way: RuntimeError: GPU 1 is lost; no restarts")
    assert [(failure.global_rank, failure.collateral) for failure in made.failures] == [
        (1, False),
        (2, True),
        (0, False),
        (3, True),
    ]


def test_the_complaint_about_a_lost_peer_is_no_root_cause() -> None:
    made = build(
        see(10.0, 0, exit_code=1, exception="RuntimeError: Connection closed by peer [127.0.0.1]:2466"),
        see(10.2, 1, exit_code=None, signal="SIGSEGV"),
    )
    assert [(failure.global_rank, failure.collateral) for failure in made.failures] == [(1, False), (0, True)]
    assert made.reason.startswith("rank 1 on node 0 (h) was ended by SIGSEGV; ")


def test_what_the_agent_knows_of_a_rank_is_no_complaint_about_a_lost_peer() -> None:
    """Rank 0 stands for the store, and complains as all ranks do once the store is gone."""
    lost = "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes"
    made = build(
        see(10.0, 2, exit_code=1, exception=lost),
        see(10.1, 0, exit_code=1, exception=lost, reason="lost its store: the store's process was ended by SIGKILL"),
    )
    assert made.reason.startswith("rank 0 on node 0 (h) lost its store: the store's process was ended by SIGKILL")


def test_ranks_that_had_exited_are_named_beside_the_complaint_about_a_lost_peer() -> None:
    lost = see(10.0, 0, exit_code=1, exception="RuntimeError: Connection closed by peer [127.0.0.1]:2466").failure
    made = build(DatedFailure(when_s=10.0, failure=add_early_exits(lost, (1, 3))))
    assert made.reason.startswith(
        "rank 0 on node 0 (h) exited with code 1 after ranks 1, 3 had exited with code 0 "
        "(RuntimeError: Connection closed by peer [127.0.0.1]:2466); "
    )
    other = see(10.0, 0, exit_code=1, exception="ValueError: no").failure
    assert [add_early_exits(other, (1,)), add_early_exits(lost, ())] == [other, lost]


def test_a_rank_that_exited_early_is_the_program_s_fault_and_not_the_network_s() -> None:
    lost = see(10.0, 0, exit_code=1, exception="RuntimeError: Connection closed by peer [127.0.0.1]:2466").failure
    found = add_early_exits(replace(lost, cause=causes.NETWORK, evidence="Connection closed"), (1,))
    assert (found.cause, found.evidence) == (causes.CRASH, "rank 1 ended before the others")


def ended(rank: int) -> Stack:
    """What a node reports of a worker that has ended by itself."""
    view = RankView(global_rank=rank, node=rank // 2, host="h", state=ENDED)
    return Stack(global_rank=rank, node=rank // 2, local_rank=rank % 2, text="", view=view)


def test_ranks_that_had_exited_on_another_node_are_named_too() -> None:
    """Their node reports them when its workers are stopped; those that have failed are failures of their own."""
    lost = see(10.0, 0, exit_code=1, exception="RuntimeError: Connection closed by peer [127.0.0.1]:2466")
    own = DatedFailure(when_s=10.0, failure=add_early_exits(lost.failure, (1,)))
    made = build(own, see(10.1, 2, exit_code=1, stopped_by_us=True), stacks=(ended(1), ended(2), ended(3)))
    assert made.reason.startswith("rank 0 on node 0 (h) exited with code 1 after ranks 1, 3 had exited with code 0 (")
    assert made.failures[0].ended_ranks == (1, 3)
    assert decode(Report, to_data(made)) == made
    assert made.stacks == ()


def test_ranks_that_had_exited_are_named_beside_several_complaints() -> None:
    lost = "RuntimeError: Connection closed by peer [127.0.0.1]:2466"
    made = build(
        see(10.0, 0, exit_code=1, exception=lost), see(10.1, 1, exit_code=1, exception=lost), stacks=(ended(3),)
    )
    assert made.reason.startswith(f"ranks 0-1 failed in the same way: {lost} after rank 3 had exited with code 0; ")


def test_equal_exit_codes_long_after_one_another_are_not_the_same_failure() -> None:
    assert [failure.collateral for failure in build(see(1.0, 0), see(2.5, 1)).failures] == [False, True]


def test_memory_is_named_in_the_first_line() -> None:
    sure = OomEvidence(certain=True, limit_bytes=4 << 30)
    killed = see(1.0, 0, exit_code=None, signal="SIGKILL", oom=sure).failure
    assert describe_failure(killed) == "rank 0 on node 0 (h) was ended by SIGKILL: out of memory (OOM, limit 4.00 GiB)"
    child = see(1.0, 0, exit_code=1, oom=sure).failure
    small = see(10.0, 0, exit_code=None, signal="SIGKILL", oom=OomEvidence(certain=True, limit_bytes=96 << 20))
    assert describe_failure(small.failure).endswith("out of memory (OOM, limit 96 MiB)")
    assert describe_failure(child).endswith("code 1: out of memory (OOM in one of its processes, limit 4.00 GiB)")
    guess = see(1.0, 0, exit_code=None, signal="SIGKILL", oom=OomEvidence(certain=False)).failure
    assert describe_failure(guess).endswith("was ended by SIGKILL: possibly out of memory (OOM)")


# -- hangs ------------------------------------------------------------------------------------------------------------

TORCH = '  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 9 in {op}\n'
TORCH += '  File "/x/site-packages/torch/distributed/c10d_logger.py", line 8 in wrapper\n'


def stack(rank, line, op=None, script="/w/main.py"):
    inner = TORCH.format(op=op) if op else ""
    text = f'Thread 0x2 (most recent call first):\n  File "/w/log.py", line 1 in f\n\nCurrent thread 0x1:\n{inner}'
    return Stack(global_rank=rank, node=0, local_rank=rank, text=f'{text}  File "{script}", line {line} in <module>')


def test_stacks_begin_with_the_line_of_the_program() -> None:
    inside = stack(0, 7, "all_reduce").text
    assert put_program_first(inside) == f"at /w/main.py:7 in <module>\n{inside}"
    assert put_program_first(put_program_first(inside)).count("at /w/main.py") == 2, "the parsers skip the line"
    for text in (stack(0, 7).text, "", "gone"):
        assert put_program_first(text) == text


def test_without_the_feature_that_judges_hangs_no_rank_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.agent.diagnosis.hangs.PARTS", ())
    idle = {"exit_code": None, "hung": True, "reason": "nothing written for 4 s"}
    made = build(see(1.0, 0, **idle), see(1.1, 1, **idle), stacks=(stack(0, 7, "all_reduce"), stack(1, 6)))
    assert made.reason.startswith("ranks 0-1 hung: nothing written for 4 s; no restarts")
    assert not any(failure.collateral for failure in made.failures)


def test_a_hang_is_not_blamed_on_a_rank_before_the_stacks_are_known() -> None:
    idle = see(1.0, 3, exit_code=None, hung=True, reason="nothing written for 4 s").failure
    assert describe_failure(idle) == "the job hung: nothing written for 4 s"


def test_a_hang_that_is_explained_names_its_rank() -> None:
    blocking = "did not enter all_reduce #6 of default_pg"
    idle = see(1.0, 3, exit_code=None, hung=True, blocking=blocking, reason="no step for 4 s").failure
    rank = f"rank 3 on node {idle.node} ({idle.host})"
    assert describe_failure(idle) == f"{rank} {blocking}; hung: no step for 4 s"
