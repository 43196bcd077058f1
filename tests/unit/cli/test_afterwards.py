"""`muster events` and `muster timeline`: records of several clocks, what happened, the page, and the trace."""

import json
import os
import re
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from doubles.job_records import START_S, Agent, Job, make_week
from event_checks import SCHEMA, find_errors
from hypothesis import given, settings
from hypothesis import strategies as st

from muster._shared.control import CommandExit, ControlError
from muster._shared.reports import Failure, Report
from muster.cli import commands
from muster.cli.history import sources
from muster.cli.history.clocks import place, show_clock
from muster.cli.history.page import BUCKETS, build_data, build_page
from muster.cli.history.sentences import tell_story
from muster.cli.history.sources import JobRecords, parse_files
from muster.cli.history.story import PHASES, Story, tell
from muster.schedulers.wording.reasons import Code, Reason
from muster.schedulers.wording.words import word


def make_job(scale: int = 20) -> Job:
    """A crash at step 60 of two nodes, resumed from step 40; 100 steps in all."""
    job = Job()
    job.start()
    job.at_s += 4.0  # of the first step
    job.step(3 * scale)
    job.fail("rank 3 exited with code 1 </script>")
    job.start(attempt=1)
    job.at_s += 4.0
    job.step(5 * scale, from_done=2 * scale)
    job.end()
    return job


def tell_job(job: Job, **more: Any) -> Story:
    return tell_files(job.list_files(), **more)


def tell_files(files: Iterable[tuple[str, bytes]], **more: Any) -> Story:
    events = parse_files(iter(files))
    return tell(JobRecords(**{"name": "job", "events": events, **more}), place(events))


def write_folder(job: Job, folder: Path, run: str = "run") -> Path:
    for name, content in job.list_files():
        path = folder / name / run / "events.jsonl"
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    return folder


# -- records -----------------------------------------------------------------------------------------------------------


def test_steps_that_follow_each_other_are_one_line_and_each_is_a_line_of_json(tmp_path, capsys) -> None:
    """One line a second hid the rest."""
    folder = write_folder(make_job(), tmp_path)
    assert commands.main(["events", f"{folder}/"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert commands.main(["events", f"{folder}/", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [line for line in lines if "steps_done" in line]
    steps = [each for each in records if each["what"] == "steps_done"]
    assert len(found) == 2 < len(steps), "one line for each round"
    for line, number in zip(found, (1, 2), strict=True):
        own = [each for each in steps if each["round"] == number]
        done = [each["detail"]["done"] for each in own]
        assert f" done {done[-1]} " in line
        assert line.startswith(f"{own[-1]['at_s']:12.3f} s ")
    assert len(lines) == 1 + len(records) - len(steps) + 2, "all others are there"


def test_the_records_of_the_tests_are_as_agents_write_them_and_the_schema_refuses_others() -> None:
    lines = [line for agent in make_job().agents for line in agent.lines]
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    for line in lines:
        assert find_errors(line) == []
        validator.validate(line)
    for wrong in ({"what": "slept"}, {"format": 3}, {"round": -1}, {"detail": {"pid": "x", "start": "warm"}}):
        assert find_errors({**lines[0], **wrong}), wrong
        assert not validator.is_valid({**lines[0], **wrong}), wrong
    assert find_errors({**lines[0], "detail": {**lines[0]["detail"], "colour": "red"}})


def test_what_is_no_record_is_left_out() -> None:
    agent = Agent(index=0, name="a", clock_s=0.0)
    agent.write(0.0, "notice", text="one")
    content = b'{"time_s": 1\n[]\n{}\nnull\n' + agent.print_lines() + agent.print_lines()[:30]
    assert [event.what for event in parse_files(iter([("x", content), ("same", content)]))] == ["notice"]


# -- clocks ------------------------------------------------------------------------------------------------------------


def test_records_are_in_their_order_although_clocks_differ_by_days() -> None:
    placed = place(parse_files(iter(make_job().list_files())))
    formed = [each for each in placed if each.event.what == "round_formed"]
    assert [each.event.node_index for each in formed[:2]] in ([0, 1], [1, 0])
    assert formed[0].at_s == pytest.approx(formed[1].at_s, abs=0.001)
    assert placed[0].at_s == pytest.approx(START_S, abs=0.001)
    assert {each.uncertainty_s for each in placed} == {0.0, 0.0005}
    assert {each.event.node_index for each in placed} == {0, 1}, "also of records before the first round"


@given(
    st.lists(st.floats(0.0, 1e9), min_size=3, max_size=3),
    st.lists(st.floats(-1e8, 1e8), min_size=3, max_size=3),
    st.floats(1e-5, 0.5),
)
def test_an_offset_is_as_right_as_it_says_whatever_the_wall_clocks_say(clocks, walls, error_s) -> None:
    agents = [Agent(index=i, name=f"a{i}", clock_s=clocks[i], wall_error_s=walls[i]) for i in range(3)]
    for agent in agents:
        agent.write(0.0, "agent_started", pid=1, start="warm", node_index=agent.index)
        agent.round = 1
    agents[0].compare(1.0, agents[0])
    agents[1].compare(1.0, agents[0], error_s)
    # node 0 is lost, node 1 leads, node 2 has only seen node 1
    agents[1].compare(5.0, agents[1])
    agents[2].compare(6.0, agents[1], error_s)
    for agent in agents:
        agent.write(10.0, "notice", text="now")
    placed = place(parse_files((f"f{each.index}", each.print_lines()) for each in agents))
    now = {each.event.node_index: each for each in placed if each.event.what == "notice"}
    for each in now.values():
        assert each.uncertainty_s is not None
        assert abs(each.at_s - now[0].at_s) <= each.uncertainty_s + 1e-4
    assert [now[index].uncertainty_s for index in range(3)] == pytest.approx([0.0, error_s, 2 * error_s])


def test_a_comparison_that_is_more_than_certain_is_left_out() -> None:
    """`muster events` never ended: each way round was better than the last."""
    job = Job()
    job.start()
    for agent in job.agents:
        for line in agent.lines:
            if line["what"] == "clock_compared":
                line["detail"]["uncertainty_s"] = -0.1
    placed = place(parse_files(iter(job.list_files())))
    assert len(placed) == sum(len(agent.lines) for agent in job.agents)
    assert all((each.uncertainty_s or 0.0) >= 0 for each in placed)


def test_an_agent_that_compared_no_clocks_is_placed_by_its_wall_clock() -> None:
    job = make_job()
    for agent in job.agents:
        agent.lines = [line for line in agent.lines if line["what"] not in ("clock_compared", "steps_done")]
    placed = place(parse_files(iter(job.list_files())))
    formed = [each for each in placed if each.event.what == "round_formed"]
    assert formed[1].at_s - formed[0].at_s == pytest.approx(37.0, abs=0.001), "the error of its wall clock"
    assert {each.uncertainty_s for each in placed} == {0.0, None}
    assert {each.incarnation for each in placed} == {0}


def test_a_leader_that_was_lost_before_any_clock_was_compared_with_its_own_is_of_the_same_job() -> None:
    """It counted as an earlier run of the job, and so it was no lost node."""
    job = Job()
    job.start()
    lost, other = job.agents
    for line in other.lines:  # it is found by when it ran
        line["time_s"] -= other.wall_error_s
    other.wall_error_s = lost.wall_error_s
    other.lines = [line for line in other.lines if line["what"] != "clock_compared"]
    for line in lost.lines:
        if line["what"] == "clock_compared":
            assert line["detail"]["leader"] == line["detail"]["member"], "the leader's own"
    other.write(job.at_s + 1.0, "round_broken", kind="fenced", reason="the leader was lost", hang=False, joined=False)
    other.round = 2
    other.write(job.at_s + 2.0, "round_formed", world_size=2, nodes=1, master="b:1", restarts_left=3, rank_offset=0)
    other.compare(job.at_s + 3.0, other)
    placed = place(parse_files(iter(job.list_files())))
    assert {each.event.agent for each in placed} == {lost.name, other.name}
    assert {each.incarnation for each in placed} == {0}


# -- the story ---------------------------------------------------------------------------------------------------------


def test_the_story_has_the_truth() -> None:
    story = tell_job(make_job())
    total_s = story.end_s - story.start_s
    assert sum(story.buckets.values()) == pytest.approx(total_s, abs=0.01)
    # 60 + 60 steps of half a second, of which 20 again; twice 4 s more for the first one
    truth = {
        "productive": 50.0,
        "repeated": 10.0,
        "start": 7.0,
        "restart": 5.0,
        "detect": 1.0,
        "stop": 0.5,
        "round": 2.0,
    }
    for name, each_s in truth.items():
        assert story.buckets[name] == pytest.approx(each_s, abs=0.02 * total_s), name
    assert story.buckets["end"] == pytest.approx(1.0, abs=0.3)
    assert story.buckets.keys() <= set(BUCKETS)
    (recovery,) = story.recoveries
    assert recovery.cost_s == pytest.approx(1.0 + 0.5 + 2.0 + 1.0 + 4.0 + 20 * 0.5, abs=0.3)
    assert sum(part_s for _, part_s in recovery.parts_s) == pytest.approx(recovery.cost_s, abs=0.001)
    assert (story.succeeded, story.runs, story.failures) == (True, False, {"worker": 1})
    course, interruptions, cost = tell_story(story)
    assert "succeeded, 100 of 1000 steps done" in course
    assert "on 2 nodes with 4 ranks" in course
    assert "interrupted by a failed worker" in interruptions
    assert "65 % of its time went into steps that count (goodput), the first one after 7.5 s" in cost
    assert "10 s in steps that were done again" in cost


def test_time_of_which_the_records_are_missing_is_not_known() -> None:
    """The pod of node 0, which records the steps, was gone: all time of the job was counted until its first step."""
    whole = make_job()
    whole.agents = whole.agents[1:]
    story = tell_job(whole)
    assert story.buckets == {"unknown": story.end_s - story.start_s}
    assert (story.goodput, story.time_to_start_s) == (None, None)
    assert tell_story(story)[2].startswith("What part of the time was productive is not known, ")


def test_what_records_that_are_missing_leave_open_is_not_told(tmp_path, capsys) -> None:
    """It said that nothing interrupted the job, and named nodes by their rank in the round."""
    job = Job(count=3)
    spare = job.agents.pop()
    zero, one = job.agents
    job.start()
    job.step(20)
    zero.write(job.at_s, "round_broken", kind="membership", reason="node 1 was lost", hang=False, joined=False)
    zero.write(job.at_s, "workers_stopped")
    job.agents = [zero, spare]
    job.start()
    job.step(40)
    for line in spare.lines[1:]:
        line["node"] = 1

    def tell_some(*agents: Agent) -> tuple[str, ...]:
        job.agents = list(agents)
        folder = write_folder(job, tmp_path / "-".join(each.name for each in agents))
        assert commands.main(["timeline", f"{folder}/", "--json", "-o", str(tmp_path / "page.html")]) == 0
        facts = json.loads(capsys.readouterr().out)
        return (facts["missing"], *facts["sentences"][:2])

    missing, course, interruptions = tell_some(zero, one, spare)
    assert (missing, " on 2 nodes with 4 ranks" in course) == ("", True)
    assert interruptions.startswith("It was interrupted by a lost node; ")
    missing, course, interruptions = tell_some(zero, one)
    assert missing == "Records are missing of 1 of 2 nodes in round 2: what happened there is not shown."
    assert interruptions.startswith("It was interrupted by a lost node, as far as there are records; ")
    missing, course, interruptions = tell_some(spare)
    where = "all nodes before round 2 and of 1 of 2 nodes in round 2"
    assert missing == f"Records are missing of {where}: what happened there is not shown."
    assert course.startswith("The job has run for at least ")
    assert interruptions == "Whether anything interrupted it is not known."


def test_a_restart_of_which_there_is_no_record_is_told() -> None:
    job = Job()
    job.start()
    job.end()
    told = tell_story(tell_job(job, restarts=2))[1]
    assert told == "Its scheduler has counted 2 restarts, and no record says why."


def test_nodes_show_their_phases_and_a_killed_one_is_lost() -> None:
    job = make_job()
    node = tell_job(job).nodes[1]
    names = [PHASES[bar.phase] for bar in node.bars]
    first = ["join", "launch", "first step", "training", "stop", "round"]
    assert names == [*first, "launch", "first step", "training"]
    assert (node.host, node.ranks) == ("host-1", {1: (2, 3), 2: (2, 3)})
    killed = job.agents[1]
    killed.lines = [line for line in killed.lines if line["round"] < 2 and line["what"] != "round_broken"][:-1]
    node = tell_job(job).nodes[1]
    assert [PHASES[bar.phase] for bar in node.bars][-2:] == ["training", "lost"]  # until the next round is there
    assert node.bars[-1].start_s == pytest.approx(START_S + 3 + 4 + 30 + 1, abs=0.1)
    assert node.bars[-1].end_s == pytest.approx(START_S + 3 + 4 + 30 + 1 + 0.5 + 2, abs=0.1)


def test_a_node_whose_workers_were_started_after_the_first_step_of_others_trains() -> None:
    job = Job(count=2)
    job.start()
    job.step(20)
    late = job.agents[1].lines[-1]
    assert late["what"] == "workers_started"
    late["monotonic_s"] += 1.0
    job.end()
    found = [[PHASES[bar.phase] for bar in node.bars] for node in tell_job(job).nodes]
    assert found[1] == ["join", "launch", "training"], found


def test_a_failure_is_marked_with_its_reason_and_the_class_of_its_cause() -> None:
    job = Job()
    job.start()
    job.fail("rank 3 exited with code 1", cause="program crash")
    job.start(attempt=1)
    job.fail("node 1 was lost", kind="membership")
    texts = [(mark.kind, mark.text) for mark in tell_job(job).marks if mark.node is None]
    assert texts == [("failure", "rank 3 exited with code 1 (cause: program crash)"), ("node", "node 1 was lost")]


def test_a_node_that_leaves_as_it_was_told_to_interrupts_nothing() -> None:
    job = Job()
    job.start()
    job.step(10)
    job.fail("node 1 (h) left: received SIGTERM", kind="membership", left=True)
    job.start()
    job.step(20)
    story = tell_job(job)
    assert story.failures == {}
    assert ("drain", "node 1 (h) left: received SIGTERM") in [(mark.kind, mark.text) for mark in story.marks]
    assert "No failure interrupted it; nodes joined or left once" in tell_story(story)[1]


@pytest.mark.parametrize(
    ("rounds", "told"),
    [
        ([(0, 0)], None),
        ([(2, 1)], "1 of 4 processes was replaced, and the others kept running"),
        ([(2, 2)], "0 of 4 processes were replaced, and the others kept running"),
        ([(2, 1), (0, 0), (0, 2)], "in 2 of its rounds 3 of 8 processes were replaced, and the others kept running"),
    ],
)
def test_how_many_processes_were_replaced_is_told_if_others_kept_running(rounds, told: str | None) -> None:
    job = Job()
    job.start()
    for attempt, kept in enumerate(rounds, 1):
        job.step(10 * attempt)
        job.fail("rank 3 exited with code 1")
        job.start(attempt=attempt, kept=kept)
    parts = tell_story(tell_job(job))[1].removesuffix(".").split("; ")
    assert [each for each in parts if "replaced" in each] == ([told] if told else [])


def test_of_a_job_that_runs_so_much_is_told_as_there_is() -> None:
    job = Job(count=1)
    job.start()
    job.step(10)
    story = tell_job(job)
    assert story.runs
    assert "has run for 8.2 s on 1 node with 2 ranks, 10 of 1000 steps done" in tell_story(story)[0]


def test_how_far_a_job_was_when_it_ended_and_how_far_it_had_been() -> None:
    job = Job(count=1)
    job.start()
    job.step(62)
    job.fail("rank 0 exited with code 1")
    job.start(attempt=1)
    job.step(11, from_done=0)
    job.fail("rank 0 exited with code 1")
    assert "11 of 1000 steps done, 62 before a restart" in tell_story(tell_job(job))[0]


def test_a_stopped_job_has_ended_although_a_node_was_lost_before() -> None:
    job = Job(count=3)
    job.start()
    job.step(20)
    lost = job.agents.pop()
    job.fail("node 2 was lost", kind="membership")
    job.start()
    job.step(30)
    assert tell_job(job).runs
    for agent in job.agents:
        agent.write(job.at_s, "signal", name="SIGTERM", guard_died=False)
        agent.write(job.at_s + 1.0, "agent_ended", exit_code=143)
    job.agents.append(lost)
    story = tell_job(job)
    assert not story.runs
    assert tell_story(story)[0].endswith("and did not succeed: its agents received SIGTERM.")
    job.agents[0].write(job.at_s - 1.0, "requested", kind="stop", limit_s=60)
    assert tell_story(tell_job(job))[0].endswith("and did not succeed: muster stop; its agents received SIGTERM.")


def test_a_lost_node_that_nobody_replaced_does_not_keep_a_job_that_was_stopped_running() -> None:
    job = Job(count=2)
    job.start()
    job.step(20)
    lost = job.agents.pop()
    job.fail("node 1 (vm) was lost: connection closed", kind="membership")
    job.agents[0].write(job.at_s + 3.0, "nodes_awaited", reason="1 of 2 nodes are here")
    job.agents.append(lost)
    assert tell_job(job).runs
    job.agents[0].write(job.at_s + 300.0, "signal", name="SIGTERM", guard_died=False)
    job.agents[0].write(job.at_s + 301.0, "agent_ended", exit_code=143)
    story = tell_job(job)
    assert not story.runs
    assert story.ending == "node 1 (vm) was lost: connection closed; then its agents received SIGTERM"


WAITS = Reason(code=Code.SLURM_WAITS, job="7", word="BeginTime")
CANCELLED = Reason(code=Code.SLURM_ENDED, job="7", word="CANCELLED")


@pytest.mark.parametrize(
    ("state", "reasons", "end", "has_ended"),
    [
        ("PENDING", (WAITS,), f" UTC, and waits to go on: {word(WAITS)}.", False),
        ("RUNNING", (Reason(code=Code.SLURM_JOB, job="7"),), " UTC, and its scheduler says RUNNING.", False),
        (
            *("CANCELLED", (CANCELLED,)),
            f", before the work was done; its scheduler says CANCELLED: {word(CANCELLED)}.",
            True,
        ),
        (
            *("CANCELLED", (Reason(code=Code.CANCELLED),)),
            "and did not succeed: all ranks stopped at one step, before the work was done.",
            True,
        ),
        ("", (), "and did not succeed: all ranks stopped at one step, before the work was done.", True),
    ],
)
def test_a_job_that_its_scheduler_stops_is_interrupted_and_may_go_on(state, reasons, end, has_ended) -> None:
    job = Job(count=2)
    job.start()
    job.step(20)
    for agent in job.agents:
        agent.write(job.at_s, "signal", name="SIGTERM", guard_died=False)
        agent.write(job.at_s + 1.0, "job_ended", succeeded=False, drained=True, reason="")
    story = tell_job(job, scheduler_state=state, scheduler_reasons=reasons)
    course, interruptions, _ = tell_story(story)
    assert course.endswith(end)
    assert course.startswith("The job ran for " if has_ended else "The job has run for ")
    assert interruptions == "No failure interrupted it; its agents were told to stop once (SIGTERM)."
    assert story.goes_on is not has_ended


def test_of_a_job_without_an_end_its_scheduler_is_believed() -> None:
    job = Job(count=2)
    job.start()
    job.step(20)
    story = tell_job(job, scheduler_state="FAILED", scheduler_reasons=(CANCELLED,))
    says = f"and no record says that it has ended; its scheduler says FAILED: {word(CANCELLED)}."
    assert tell_story(story)[0].endswith(says)
    assert tell_story(tell_job(job, scheduler_state="RUNNING"))[0].endswith("and no record says that it has ended.")


def test_a_job_that_failed_by_itself_or_that_a_person_stopped_was_not_told_to_stop() -> None:
    job = Job(count=2)
    job.start()
    job.step(20)
    for agent in job.agents:
        agent.write(job.at_s, "job_ended", succeeded=False, drained=False, reason="rank 1 exited with code 1")
        agent.write(job.at_s + 1.0, "signal", name="SIGTERM", guard_died=False)
    failed = Reason(code=Code.JOB_FAILED, text="rank 1 on node 1 exited with code 1")
    story = tell_job(job, scheduler_state="FAILED", scheduler_reasons=(failed,))
    assert tell_story(story)[0].endswith("and did not succeed: rank 1 exited with code 1.")
    assert tell_story(story)[1] == "Nothing interrupted it."


def test_who_reports_no_steps_is_told_how_to() -> None:
    job = Job()
    job.start()
    job.fail("rank 3 exited with code 1", after_s=60.0)
    job.start(attempt=1)
    job.end()
    story = tell_job(job)
    assert (story.goodput, story.time_to_start_s, story.failures) == (None, pytest.approx(3.0), {"worker": 1})
    assert "call muster.worker.step(i)" in tell_story(story)[2]
    assert {PHASES[bar.phase] for bar in story.nodes[0].bars} >= {"launch", "training", "stop"}


def test_a_lost_leader_leaves_its_end_to_the_next_one() -> None:
    job = Job()
    job.start()
    job.step(20)
    lost, other = job.agents
    lost.lines = [line for line in lost.lines if line["what"] != "job_ended"]
    other.write(job.at_s + 2.0, "round_broken", kind="membership", reason="node 0 was lost", hang=False, joined=False)
    other.write(job.at_s + 3.0, "workers_stopped")
    other.round = 2
    other.write(job.at_s + 4.0, "round_formed", world_size=2, nodes=1, master="b:1", restarts_left=3, rank_offset=0)
    other.compare(job.at_s + 4.0, other)
    other.write(job.at_s + 5.0, "workers_started", (0, 1))
    detail = {"is_counted": True, "ago_s": 0.0, "total": 1000, "values": {}}
    for done in range(15, 40):
        other.write(job.at_s + 5.0 + (done - 14) * 0.5, "steps_done", done=done, **detail)
    other.write(job.at_s + 20.0, "job_ended", succeeded=True, drained=False, reason="")
    story = tell_job(job)
    assert story.failures == {"node": 1}
    assert story.recoveries[0].cause == "node 0 was lost"
    assert story.buckets["detect"] == pytest.approx(2.0, abs=0.3)
    assert max(done for _, done in story.steps) == 39


def start_again(killed: Agent, name: str, at_s: float) -> Agent:
    """Start the killed agent's node again. The clock of the machine goes on."""
    again = Agent(index=killed.index, name=name, clock_s=killed.clock_s, wall_error_s=killed.wall_error_s)
    again.write(at_s, "agent_started", pid=2, start="warm", host=f"host-{again.index}", node_index=again.index)
    return again


def check_loss_of_node_0(story: Story) -> None:
    """The job was killed after 20 steps and trained again from the first one."""
    assert story.failures == {"node": 1}
    (recovery,) = story.recoveries
    assert recovery.cause == "node 0 (host-0) was lost: its agent was killed"
    assert recovery.cost_s is not None
    assert story.buckets["repeated"] == pytest.approx(10.0, abs=0.1)
    assert story.buckets["productive"] == pytest.approx(25.0, abs=0.1)
    assert sum(story.buckets.values()) == pytest.approx(story.end_s - story.start_s, abs=0.01)
    assert "It was interrupted by a lost node;" in tell_story(story)[1]
    assert [mark.text for mark in story.marks if mark.kind == "node"] == [recovery.cause]


@pytest.mark.parametrize("count", [2, 3])
def test_node_0_that_was_killed_and_started_again_is_a_lost_node(count: int) -> None:
    """The new agent leads the next round, so that the one that saw the loss never speaks for the job."""
    job = Job(count=count)
    job.start()
    job.step(20)
    killed, *others = job.agents
    job.at_s += 1.0
    for other in others:
        reason = "the leader was lost (connection closed): searching for it or its successor"
        other.write(job.at_s, "round_broken", kind="fenced", reason=reason, hang=False, joined=False)
        other.write(job.at_s + 0.5, "workers_stopped")
        other.compare(job.at_s + 0.6, others[0])
    job.agents[0] = start_again(killed, "a0b", job.at_s + 1.0)
    job.start()
    job.step(50, from_done=0)
    job.end()
    job.agents.append(killed)
    story = tell_job(job)
    check_loss_of_node_0(story)
    assert story.buckets["detect"] == pytest.approx(1.0, abs=0.1)
    assert (story.buckets["stop"], story.buckets["round"]) == (pytest.approx(0.5), pytest.approx(1.5, abs=0.01))
    assert story.steps_done == (50, 50)


def test_the_only_node_that_was_killed_and_started_again_is_a_lost_node() -> None:
    job = Job(count=1)
    job.start()
    job.step(20)
    (killed,) = job.agents
    job.at_s += 4.0
    job.number = 0
    job.agents = [start_again(killed, "a0b", job.at_s)]
    job.start()
    job.step(50, from_done=0)
    job.end()
    job.agents.append(killed)
    story = tell_job(job)
    check_loss_of_node_0(story)
    assert story.buckets["waiting"] == pytest.approx(3.8, abs=0.1), "without workers"


def test_a_job_that_was_queued_again_after_a_signal_has_no_lost_node() -> None:
    job = Job(count=1)
    job.start()
    job.step(20)
    (first,) = job.agents
    first.write(job.at_s, "signal", name="SIGTERM", guard_died=False)
    first.write(job.at_s, "agent_ended", exit_code=143)
    job.agents = [start_again(first, "a0b", job.at_s + 4.0)]
    job.at_s, job.number = job.at_s + 4.0, 0
    job.start()
    job.end()
    job.agents.append(first)
    assert tell_job(job).failures == {}


def test_marks_tell_what_an_agreement_was_for_and_who_asked() -> None:
    """A reader who was not there saw three drains that looked alike."""
    job = Job()
    job.start()
    job.step(20)
    leader = job.agents[0]
    for number, kind in enumerate(("checkpoint", "pause", "join", "stop"), 1):
        leader.write(job.at_s, "requested", kind=kind)
        leader.write(job.at_s, "drain_begun", drain=number, kind=kind, limit_s=9.0)
        leader.write(job.at_s + 0.1, "drain_committed", drain=number, step=20 + number)
    job.end()
    texts = [mark.text for mark in tell_job(job).marks]
    assert [text for text in texts if "agreed" in text] == [
        "all ranks agreed to save at step 21",
        "all ranks agreed to pause at step 22",
        "all ranks agreed to wait at step 23",
        "all ranks agreed to stop at step 24",
    ]
    assert texts.count("a person asked for it: muster pause") == 1


def test_the_mark_of_a_hang_says_who_kept_the_others_waiting_and_since_when() -> None:
    job = Job()
    job.start()
    job.step(20)
    stood_s = job.at_s
    reason = "the job hung: no collective and no step for 30 s"
    job.fail(reason, after_s=30.0, hang=True, cause="hang")
    cause = "rank 3 (node 1, host-1) did not enter all_reduce #20 of default_pg, where ranks 0-2 wait"
    job.leader.write(job.at_s, "hang_explained", text=cause)
    job.start(attempt=1)
    job.step(40)
    later_s = job.at_s
    for text in ("the job hangs: no step for 9 s", cause):
        job.leader.write(job.at_s + 9.0, "hang_named", text=text)
    job.at_s += 10.0
    job.leader.write(job.at_s, "hang_ended", text="the job goes on: it has not hung")
    job.step(50)
    job.end()
    story = tell_job(job)
    first, second = [mark for mark in story.marks if mark.kind == "hang"]
    assert (first.text, first.since_s) == (f"{reason} (cause: hang); {cause}", pytest.approx(story.start_s + stood_s))
    assert second.text == f"the job hangs: no step for 9 s; {cause}"
    assert second.since_s == pytest.approx(story.start_s + later_s)
    marks = [mark for mark in build_data(story)["marks"] if mark[1] == "hang"]
    assert [mark[5] for mark in marks] == [round(1000 * stood_s), round(1000 * later_s)]


def test_two_incarnations_are_one_job() -> None:
    first, second = make_job(), make_job()
    for agent in first.agents:
        agent.lines = [line for line in agent.lines if line["round"] < 2]
    for agent in second.agents:
        agent.name += "b"
        for line in agent.lines:
            line["time_s"] += 500.0
            line["monotonic_s"] += 7e6
            line["agent"] += "b"
            for key in ("member", "leader"):
                if key in line["detail"]:
                    line["detail"][key] += "b"
            if "ahead_s" in line["detail"]:
                line["detail"]["ahead_s"] += 0.0
    files = [*first.list_files(), *((f"{name}b", content) for name, content in second.list_files())]
    story = tell_files(files)
    assert (story.incarnations, len(story.nodes)) == (2, 2)
    assert story.end_s - story.start_s == pytest.approx(500.0 + second.at_s, abs=1.0)
    assert sum(story.buckets.values()) == pytest.approx(story.end_s - story.start_s, abs=0.01)
    assert story.buckets["waiting"] > 400.0
    assert "in 2 runs by its scheduler" in tell_story(story)[0]


@settings(max_examples=30)
@given(st.data())
def test_whatever_stands_in_the_details_is_told_without_an_error(data: st.DataObject) -> None:
    job = make_job(scale=2)
    junk = st.one_of(
        st.none(), st.booleans(), st.integers(-1, 1 << 70), st.floats(), st.text(max_size=5), st.just([{}])
    )
    for agent in job.agents:
        for line in agent.lines:
            if line["detail"] and data.draw(st.integers(0, 5)) == 0:
                line["detail"][data.draw(st.sampled_from(sorted(line["detail"])))] = data.draw(junk)
    story = tell_job(job)
    build_page(story)
    assert all(tell_story(story))


@pytest.mark.parametrize(("at_s", "words"), [(0.0, "1970-01-01 00:00:00"), (-2.2e11, "second -220000000000")])
def test_a_time_that_no_calendar_has_is_told(at_s: float, words: str) -> None:
    assert show_clock(at_s) == words


# -- the page ----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a browser makes of it: elements, the content of scripts, and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.policy = ""
        self.addresses: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        found = dict(attrs)
        self._in_script = tag == "script"
        self.addresses += [found[name] for name in ("src", "href", "action") if name in found]
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"]

    def handle_endtag(self, tag):
        self._in_script = False

    def handle_data(self, data):
        if self._in_script:
            self.scripts.append(data)


def test_nothing_of_a_log_can_end_the_script_and_nothing_is_loaded() -> None:
    job = make_job()
    evil = "</script><script>alert(1)</script><!-- @DATA@ \u2028 <img src=x onerror=alert(1)>"
    job.agents[0].lines[0]["detail"]["host"] = evil
    job.fail(evil)
    numbers = dict.fromkeys(("node", "node_index", "local_rank", "global_rank", "attempt", "round", "pid"), 1)
    failure = Failure(**numbers, time_s=1.0, host=evil, reason=evil, exception=evil, traceback=evil)
    text = build_page(tell_job(job, name=evil, report=Report(reason=evil, failures=(failure,))))
    page = Page(text)
    assert page.tags.count("script") == 2
    assert "img" not in page.tags
    assert page.addresses == []
    assert page.policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in page.policy
    data = json.loads(page.scripts[0])
    assert data["nodes"][0]["host"].startswith("</script><script>alert(1)")
    assert "http://" not in text.replace("http-equiv", "")
    assert "https://" not in text


def test_rows_that_are_alike_are_one_and_bars_are_those_of_the_story() -> None:
    job = Job(count=8)
    job.start()
    job.step(20)
    job.fail("rank 15 exited with code 1", kind="membership")
    job.start()
    job.step(40)
    for agent in job.agents:
        agent.lines = [line for line in agent.lines if line["what"] != "worker_failed"]
    job.end()
    story = tell_job(job)
    data = build_data(story)
    assert data["groups"] == [list(range(8))]
    assert data["labels"] == ["nodes 0-7 (8 alike)"]
    bars, at = data["nodes"][3]["bars"], 0
    for number, bar in enumerate(story.nodes[3].bars):
        gap, length, phase, round_number = bars[4 * number : 4 * number + 4]
        assert (at + gap) / 1000 == pytest.approx(bar.start_s - story.start_s, abs=0.001)
        at += gap + length
        assert (phase, round_number) == (bar.phase, bar.round)


@pytest.mark.long
def test_a_week_on_64_nodes_is_a_small_page() -> None:
    story = tell_job(make_week())
    assert story.end_s - story.start_s == pytest.approx(7 * 86400, rel=0.05)
    text = build_page(story)
    assert len(text.encode()) < 5_000_000
    assert len(story.recoveries) == 500
    assert sum(story.buckets.values()) == pytest.approx(story.end_s - story.start_s, abs=1.0)


# -- the commands ------------------------------------------------------------------------------------------------------


def test_events_of_a_folder_as_text_and_as_json(tmp_path, capsys) -> None:
    folder = write_folder(make_job(), tmp_path / "logs")
    assert commands.main(["events", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("0 s is 20")
    assert re.search(r"2\.000 s +±0\.5 ms +node 1 +round 1 attempt 0 +round_formed +world_size 4", "\n".join(lines))
    assert commands.main(["events", str(folder), "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    times = [record["at_s"] for record in records]
    assert times == sorted(times)
    assert times[0] == 0.0
    for record in records:
        own = {name: each for name, each in record.items() if name not in ("at_s", "uncertainty_s", "incarnation")}
        assert find_errors(own) == []


def test_a_timeline_is_written_and_said(tmp_path, capsys, monkeypatch) -> None:
    folder = write_folder(make_job(), tmp_path / "logs", run="train-7")
    monkeypatch.chdir(tmp_path)
    assert commands.main(["timeline", str(folder)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("The job ran for ")
    assert said.err.startswith("written: train-7.html (")
    assert (tmp_path / "train-7.html").read_text().startswith("<!doctype html>")
    assert commands.main(["timeline", str(folder), "-o", str(tmp_path / "none" / "x.html")]) == CommandExit.REFUSED
    assert "cannot write" in capsys.readouterr().err


def test_a_name_that_is_no_unicode_ends_no_timeline(tmp_path) -> None:
    job = make_job()
    job.fail("no file data\udcff.bin")
    page = tmp_path / "page.html"
    assert commands.main(["timeline", str(write_folder(job, tmp_path / "logs")), "-o", str(page)]) == 0
    assert "no file data" in page.read_text()


def test_the_facts_of_a_timeline_as_json_and_what_a_failed_rank_left(tmp_path, capsys) -> None:
    folder = write_folder(make_job(), tmp_path / "logs")
    error = folder / "node1" / "run" / "attempt_0" / "1" / "error.json"
    error.parent.mkdir(parents=True)
    error.write_text(json.dumps({"message": {"message": "x", "extraInfo": {"py_callstack": "Traceback: bad batch"}}}))
    page = tmp_path / "page.html"
    assert commands.main(["timeline", str(folder), "-o", str(page), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["failures"], facts["steps"], facts["succeeded"]) == ({"worker": 1}, 100, True)
    assert sum(facts["seconds"].values()) == pytest.approx(facts["duration_s"], abs=0.1)
    assert facts["recoveries"][0]["parts_s"]["repeated"] == pytest.approx(10.0, abs=0.5)
    assert facts["written"] == [str(page)]
    data = json.loads(Page(page.read_text()).scripts[0])
    assert [mark[4] for mark in data["marks"] if len(mark) > 4] == ["Traceback: bad batch"]


def test_of_a_folder_with_several_runs_the_newest_is_taken(tmp_path, capsys) -> None:
    """As `muster status` does, for which the same file counts. The others are named."""
    for number, name in enumerate(("b", "a", "c")):
        write_folder(make_job(), tmp_path / f"host{number}", run=name)
        for path in (tmp_path / f"host{number}").rglob("events.jsonl"):
            os.utime(path, (0, (5, 9, 7)[number]))
    assert sources.load(str(tmp_path)).name == "a"
    line = capsys.readouterr().err
    folders = f"{tmp_path}/host2/node0/c, {tmp_path}/host0/node0/b"
    assert line == f"muster: {tmp_path} has the logs of 3 runs; this is the newest, a; others are in {folders}\n"
    assert sources.load(f"{tmp_path}/host2/node0/c").name == "c"
    assert capsys.readouterr().err == ""


def test_a_folder_without_records_is_one_line(tmp_path) -> None:
    with pytest.raises(ControlError, match=r"has no events\.jsonl"):
        sources.load(str(tmp_path))
    write_folder(make_job(), tmp_path / "one", run="a")
    with pytest.raises(ControlError, match="--role is for an app"):
        sources.load(str(tmp_path), "trainer")
