"""What `torchx status` and views are told of a running job: through looks, summaries and the file."""

import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doubles.telemetry_nodes import FakeLeader, FakeLoop, Node

from muster._shared.job_view import JobState, RankState
from muster._shared.layouts import StatusPageLayout as Layout
from muster._shared.records import replace
from muster.agent.rendezvous.interface import LeaderClock
from muster.agent.runtime.event_log import EventRecord
from muster.agent.telemetry import Pause, StatusFile
from muster.agent.telemetry.sampling import OpenCollective, pack, unpack
from muster.schedulers.wording.job_line import describe_status


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.page.close()


def make_nodes(folder: Path, count: int, nproc: int = 2, apart_s: float = 0.0) -> list[Node]:
    loop, leader, nodes = FakeLoop(), FakeLeader(count), []
    for rank in range(count):
        (folder / str(rank)).mkdir()
        nodes.append(Node(folder / str(rank), nproc=nproc, loop=loop, leader=leader, rank=rank))
        if apart_s:
            loop.run(apart_s)
    return nodes


def step_all(nodes: list[Node], *steps: int, each_s: float = 0.0) -> None:
    """All ranks do these steps, and time passes after each."""
    for step in steps:
        for node in nodes:
            node.step(*[step] * node.nproc)
        if each_s:
            nodes[0].loop.run(each_s)


def make_running(folder: Path, count: int) -> list[Node]:
    """All have done step 5, and node 0 has looked."""
    nodes = make_nodes(folder, count)
    step_all(nodes, 5)
    nodes[0].look(2.0)
    return nodes


def describe(node: Node) -> str:
    return describe_status(node.read())


def test_the_rank_that_has_done_the_fewest_steps_counts(node: Node) -> None:
    node.step(2, 0)
    node.look()
    for step in range(1, 6):
        node.step(8 * step + 2, 8 * step)
        status = node.look()
    assert [rank.lag_steps for rank in status.ranks] == [0, 2]
    assert (status.step, status.total, status.rate) == (40, 1000, 8.0)
    assert (status.eta_s, status.world_size, status.state) == (pytest.approx(119.9), 2, JobState.RUNNING)
    assert status.time_s == node.loop.wall_s()
    assert node.told[-1] == status


def test_a_look_that_takes_long_puts_no_clock_ahead(tmp_path: Path) -> None:
    """On a busy machine the agent may stand still between two lines of its look."""
    node, _ = make_nodes(tmp_path, 2)

    class SlowLines(dict[int, bytes]):
        def get(self, *_key: object) -> bytes:  # type: ignore[override]
            node.loop.at_s += 0.01
            return b""

    node.lines, node.clock = SlowLines(), LeaderClock(own_id="a", leader_id="a")
    records: list[EventRecord] = []
    sink: Any = SimpleNamespace(write=records.append)
    node.log.add_sink(sink)
    node.step(1, 1)
    node.look()
    [compared] = [each for each in records if each.what == "clock_compared"]
    assert compared.detail["ahead_s"] == 0.0


def test_it_is_written_every_second_while_something_changes_and_else_every_five(node: Node) -> None:
    for step in range(10):
        node.step(step, step)
        node.look()
    assert 10 <= node.writes <= 11
    before = node.writes
    node.look(30.0)
    assert node.writes - before == 6


def test_a_job_whose_last_step_is_much_older_than_a_step_takes_says_so(node: Node) -> None:
    step_all([node], *range(5), each_s=1.0)
    node.look(9.0)
    assert describe(node).startswith("step 4 of 1000, 0."), "not clearly longer"
    status = node.look(5.0)
    assert describe(node).endswith(" 14 s")
    assert (status.eta_s, status.still_s) == (None, pytest.approx(14.0, abs=2.0))
    node.step(5, 5)
    assert node.look().still_s is None
    assert describe(node).startswith("step 5 of 1000, 0.")


@pytest.mark.parametrize("steps", [0, 1], ids=["none", "one"])
def test_a_first_step_that_is_slow_is_no_standstill(node: Node, steps: int) -> None:
    step_all([node], *range(steps), each_s=1.0)
    node.look(300.0)
    assert "no step for" not in describe(node)


def test_slow_steps_last_steps_and_optimizers_steps(node: Node) -> None:
    step_all([node], *range(4), each_s=20.0)
    node.look(35.0)
    assert "no step for" not in describe(node), "a step takes 20 s"
    node.look(20.0)
    assert "no step for" in describe(node)
    node.step(999, 999)
    node.look()
    assert node.look(500.0).still_s is None, "none is left"


def test_a_pause_is_in_it_with_its_time_and_so_is_its_end(node: Node) -> None:
    node.step(214, 214)
    node.look()
    node.pause = Pause(step=214, since_s=node.loop.wall_s())
    node.look()
    assert describe(node).startswith("paused at step 214 ")
    node.pause = None
    assert node.look().state is JobState.RUNNING


def test_of_a_script_that_reports_nothing_its_optimizer_counts(node: Node) -> None:
    node.set_word(0, Layout.OPTIMIZER_STEPS, 8)
    node.set_word(1, Layout.OPTIMIZER_STEPS, 9)
    node.look()
    assert describe(node) == "step 8 (by optimizer)"


def test_a_new_round_has_no_speed_yet(node: Node) -> None:
    step_all([node], 10, 20, 30, each_s=1.0)
    assert node.told[-1].rate == 10.0
    node.restart("rank 1 exited with code 1", 2)
    node.step(20, 20)
    node.look()
    assert describe(node) == "step 20 of 1000"


def test_a_page_that_lies_breaks_nothing(node: Node) -> None:
    node.step(10, 10)
    for word, value in (
        (Layout.STEP, -5),
        (Layout.OPTIMIZER_STEPS, -(2**63)),
        (Layout.CHANGED_NS, 2**63 - 1),
        (Layout.PHASE, 2**62),
        (Layout.VALUES, 2**62),
        (Layout.OWNER, -1),
    ):
        node.set_word(0, word, value)
    node.set_word(1, Layout.TOTAL, 2**63 - 1)
    status = node.look()
    assert describe(node) == "step 10"
    assert (status.ranks[0].step, status.ranks[1].step, status.ranks[1].total) == (None, 10, None)
    node.set_word(1, Layout.CHANGED_NS, -(2**63))
    node.set_word(1, Layout.STEP, 2**63 - 1)
    assert node.look(6.0).ranks[1].step is None


def test_values_that_are_no_numbers_are_text(node: Node) -> None:
    node.step(10, 10, total=3)
    for index, (name, value) in enumerate(((b"loss", math.nan), (b"\x1b[2Jlr", math.inf), (b"\xff", -0.25))):
        word = Layout.VALUE_TABLE + index * Layout.VALUE_ENTRY_WORDS
        node.set_text(0, word, name)
        node.set_word(0, word + Layout.VALUE_ENTRY_WORDS - 1, struct.unpack("q", struct.pack("d", value))[0])
        node.set_word(0, Layout.VALUES, index + 1)
    status = node.look()
    assert status.values == (("loss", "nan"), (r"\x1b[2Jlr", "inf"), ("\ufffd", -0.25))
    assert (status.step, status.total, status.eta_s) == (10, 3, None)


def test_a_last_line_of_any_bytes_is_shown_as_text(node: Node) -> None:
    node.lines[0] = b"\x1b[2J\x1b[1;31mloss 0.5\x1b[0m\xff\xfe\x07 \x1b]0;title\x07done"
    node.lines[1] = b"x" * 10_000
    first, second = (rank.last_line for rank in node.look().ranks)
    assert first == "loss 0.5\ufffd\ufffd\\x07 done"
    assert len(second) == 160
    assert "\x1b" not in node.path.read_text()


def test_a_folder_that_is_gone_breaks_nothing(node: Node, tmp_path: Path) -> None:
    node.plane._file = StatusFile(str(tmp_path / "gone"), node._submit)
    node.step(10, 10)
    node.loop.run(10.0)
    assert not node.path.exists()
    assert node.told[-1].step == 10


def test_a_disk_that_hangs_gets_one_write_and_then_the_newest(node: Node) -> None:
    node.holds_disk = True
    step_all([node], *range(50), each_s=1.0)
    assert len(node.held) == 1
    node.holds_disk = False
    node.held[0]()
    node.step(60, 60)
    assert node.look().step == 60


# -- several nodes ----------------------------------------------------------------------------------------------------


def test_the_leader_writes_of_all_nodes(tmp_path: Path) -> None:
    nodes = make_nodes(tmp_path, 3)
    for step in range(6):
        for node in nodes:
            node.step(step * 10 + node.rank, step * 10 + node.rank)
        nodes[0].loop.run(1.0)
    status = nodes[0].look(1.0)
    assert [each.host for each in status.nodes] == ["host-0", "host-1", "host-2"]
    assert [rank.step for rank in status.ranks] == [50, 50, 51, 51, 52, 52]
    assert [rank.lag_steps for rank in status.ranks] == [2, 2, 1, 1, 0, 0]
    assert (status.step, status.nodes_running, status.world_size) == (50, 3, 6)
    assert not nodes[1].path.exists()
    assert not nodes[2].path.exists()


def test_ranks_that_wait_for_one_another_are_shown_at_the_same_step(tmp_path: Path) -> None:
    """Nodes begin to look at different moments, and another node's clock differs."""
    nodes = make_nodes(tmp_path, 3, apart_s=0.37)
    nodes[0].leader.knows_ages = True
    for rank, node in enumerate(nodes):
        node.clock = LeaderClock(own_id=str(rank), leader_id="0")
    for step in range(300):
        step_all(nodes, step, each_s=0.1)
        status = nodes[0].told[-1]
        if step > 30:
            assert {rank.step for rank in status.ranks} == {status.step}, step
            assert not status.slow_ranks


def test_the_next_leader_goes_on_in_its_own_folder(tmp_path: Path) -> None:
    nodes = make_running(tmp_path, 3)
    leader = nodes[0].leader
    leader.leads, leader.present = 1, [1, 2]
    leader.summaries.clear()
    for node in nodes[1:]:
        node.log.write("round_broken", kind="membership", reason="node 0 (host-0) was lost: connection closed")
    nodes[0].plane.close()
    nodes[1].loop.run(2.0)
    status = nodes[1].read()
    assert (status.state, "(host-0) was lost" in status.reason) == (JobState.RESTARTING, True)
    assert status.events[0].text.startswith("round 1: "), "it knows what was before"
    assert [(each.host, each.state.value) for each in status.nodes] == [("host-1", "running"), ("host-2", "running")]


def test_node_0_that_does_not_lead_any_more_tells_the_leader_and_writes_of_its_own_ranks(tmp_path: Path) -> None:
    nodes = make_nodes(tmp_path, 2)
    nodes[0].leader.leads = 1
    for node in nodes:
        node.step(5 + node.rank, 5 + node.rank)
    nodes[0].loop.run(3.0)
    own, whole = nodes[0].read(), nodes[1].read()
    assert (own.step, own.nodes_running, [rank.global_rank for rank in own.ranks]) == (5, 2, [0, 1])
    assert (whole.step, whole.nodes_running, [rank.step for rank in whole.ranks]) == (5, 2, [5, 5, 6, 6])


def test_node_0_that_does_not_lead_leaves_the_file_of_the_leader_in_a_shared_folder(tmp_path: Path) -> None:
    nodes = make_nodes(tmp_path, 2)
    nodes[0].leader.leads = 1
    nodes[0].plane._file = StatusFile(str(tmp_path / "1"), nodes[0]._submit)
    for step in range(20):
        for node in nodes:
            node.step(step, step)
        nodes[0].loop.run(1.0)
        found = nodes[1].read()
        if step > 1:
            assert len(found.ranks) == 4, step
    nodes[1].plane.close()
    os.utime(nodes[1].path, (0, 0))  # the leader has not written for long
    nodes[0].step(50, 50)
    nodes[0].loop.run(2.0)
    found = nodes[1].read()
    assert (found.step, len(found.ranks)) == (50, 2)


def test_a_node_that_is_lost_is_named_until_the_next_round(tmp_path: Path) -> None:
    nodes = make_nodes(tmp_path, 3)
    nodes[0].look(2.0)
    nodes[0].leader.present = [0, 2, None]
    status = nodes[0].look(2.0)
    assert [(each.node_index, each.node, each.host, each.state.value) for each in status.nodes] == [
        (0, 0, "host-0", "running"),
        (1, 1, "host-1", "lost"),
        (2, 2, "host-2", "running"),
        (3, None, "host-None", "spare"),
    ]
    assert (status.nodes_running, status.nodes_lost, status.nodes_spare) == (2, 1, 1)


def test_nodes_that_wait_for_the_first_round_are_not_spare(tmp_path: Path) -> None:
    """A job without spare nodes said "1 spare" while it started."""
    node = make_nodes(tmp_path, 1)[0]
    node.leader.present = [None, None]
    status = node.look(2.0)
    assert (status.nodes_spare, [each.state.value for each in status.nodes]) == (0, [])


@pytest.mark.parametrize("is_late", [False, True])
def test_nodes_that_leave_after_the_end_are_not_lost(is_late: bool, tmp_path: Path) -> None:
    nodes = make_running(tmp_path, 3)
    nodes[0].leader.present = [0, 2]  # this one is lost
    nodes[0].log.write("round_broken", kind="final", reason="node 1 (host-1) was lost: connection closed")
    if is_late:
        nodes[0].look(1.0)
    nodes[0].leader.present = [0]
    nodes[0].log.write("agent_ended", exit_code=1)
    found = nodes[0].read()
    assert [each.state.value for each in found.nodes] == ["running", "lost", "running"]
    assert (found.nodes_running, found.nodes_lost) == (2, 1)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_node_whose_workers_have_ended_says_so_at_once(is_stopped: bool, tmp_path: Path) -> None:
    """Else the failed rank of another node ran for ever, and a job that has succeeded was short of its last steps."""
    nodes = make_running(tmp_path, 2)
    other = nodes[1]
    other.step(9, 8)
    other.states, other.lines = {0: RankState.ENDED, 1: RankState.FAILED}, {1: b"ValueError: no data"}
    other.log.write("worker_exited", code=0)
    other.pids = {}
    other.log.write("workers_stopped" if is_stopped else "worker_exited", code=1)
    nodes[0].log.write("job_ended", succeeded=False, reason="rank 3 on node 1 exited with code 1")
    nodes[0].log.write("agent_ended", exit_code=1)
    found = nodes[0].read()
    assert [(rank.state.value, rank.step, rank.last_line) for rank in found.ranks[2:]] == [
        ("ended", 9, ""),
        ("failed", 8, "ValueError: no data"),
    ]


def test_a_node_that_stalls_is_shown_with_what_it_said_last(tmp_path: Path) -> None:
    nodes = make_running(tmp_path, 2)
    nodes[1].plane.close()
    nodes[0].step(6, 6)
    assert nodes[0].look(2.0).nodes[1].step == 5


def test_what_another_node_says_is_not_believed(tmp_path: Path) -> None:
    nodes = make_nodes(tmp_path, 2)
    nodes[0].look(2.0)
    leader = nodes[0].leader
    nodes[1].plane.close()
    for text in ("", "x" * 30_000, "0", "\u20ac"):
        leader.summaries[1] = leader.summaries[1].__class__(round_number=1, step=None, most_step=None, text=text)
        nodes[0].step(leader.sent_bytes % 7, 3)
        nodes[0].loop.run(6.0)
    status = nodes[0].read()
    assert status.time_s >= nodes[0].loop.wall_s() - 5.0, "it goes on"
    assert [each.node for each in status.ranks] == [0, 0]


def test_a_node_sends_less_than_a_kilobyte_a_second(tmp_path: Path) -> None:
    nodes = make_nodes(tmp_path, 2, nproc=8)
    for step in range(60):
        for node in nodes:
            node.step(*[step * 1000 + rank for rank in range(8)])
            node.lines = {rank: f"step {step} loss {1 / (step + rank + 1)} ".encode() * 3 for rank in range(8)}
        nodes[0].loop.run(1.0)
    leader = nodes[0].leader
    assert 10_000 < leader.sent_bytes <= 60_000
    sent = unpack(leader.summaries[1].text)
    assert len(sent.ranks) == 8
    json.dumps(nodes[0].look().__dict__, default=str)


def test_a_full_disk_leaves_the_last_status_and_nothing_else(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.step(5, 5)
    before = node.look()

    def refuse(*_paths: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refuse)
        node.step(6, 6)
        assert node.look() == before
    assert [path.name for path in node.path.parent.iterdir()] == ["status.json"]
    node.step(7, 7)
    assert node.look().step == 7


def test_a_job_whose_next_round_is_held_back_says_why(tmp_path: Path) -> None:
    """It said that it waited for nodes, and that all of them were there."""
    node, _ = make_nodes(tmp_path, 2)
    node.log.write("round_broken", kind="failure", reason="rank 1 exited with code 1")
    node.log.write("workers_stopped")
    node.leader.storm_s = 20.0
    status = node.look(15.0)
    assert (status.state, "again and again" in status.reason) == (JobState.WAITING, True)


# -- slow ranks -------------------------------------------------------------------------------------------------------


def test_a_rank_that_arrives_last_at_each_collective_is_named(node: Node) -> None:
    for look in range(12):
        node.step(20 * look, 20 * look)
        node.arrivals = {0: 0.0, 1: 0.02 + look % 3 / 1000}
        status = node.look()
    [slow] = status.slow_ranks
    assert (slow.global_rank, slow.is_chronic, slow.share) == (1, True, 1.0)
    assert "0.021 s late at" in slow.describe()
    named = [event.text for event in node.look().events if event.text.startswith("rank 1 on host-0 is 0.02")]
    assert len(named) == 1


def test_a_collective_is_not_shown_of_a_rank_that_has_gone_on_since(node: Node) -> None:
    node.collectives = {rank: OpenCollective(text=f"all_reduce #{rank}", age_s=2.0) for rank in (0, 1)}
    node.looked_s = node.loop.at_s
    node.loop.run(0.5)
    node.step(1)
    assert [rank.collective for rank in node.look().ranks] == ["", "all_reduce #1"]
    node.looked_s = node.loop.at_s
    assert [rank.collective for rank in node.look(5.0).ranks] == ["all_reduce #0", "all_reduce #1"]


def test_the_last_step_of_a_drained_job_is_the_one_at_which_all_have_stopped(tmp_path: Path) -> None:
    nodes = make_running(tmp_path, 2)
    nodes[0].step(9, 9)
    nodes[0].log.write("job_ended", succeeded=False, drained=True, reason="")
    nodes[0].log.write("agent_ended", exit_code=143)
    found = nodes[0].read()
    assert found.step == 9


def test_looks_at_the_same_collectives_count_once(node: Node) -> None:
    """A rank of a job that hung was named as late at each step, for what it was late once."""
    for look in range(40):
        node.arrivals = {0: 0.0, 1: 0.003 + look * 1e-9}
        status = node.look()
    assert status.slow_ranks == ()


@pytest.mark.parametrize("are_grouped", [True, False])
def test_a_rank_that_arrives_last_at_each_step_is_named_if_others_wait_for_it(node: Node, are_grouped: bool) -> None:
    """Of ranks without a process group, which never waited, one that had started later was named."""
    node.are_grouped = are_grouped
    for look in range(20):
        node.step(5 * look, 5 * look)
        node.set_word(0, Layout.CHANGED_NS, int((node.loop.at_s - 0.1 + look % 3 / 1000) * 1e9))
        status = node.look()
    found = [(each.global_rank, each.late_s) for each in status.slow_ranks]
    assert found == ([(1, 0.099)] if are_grouped else [])


def test_a_rank_of_another_node_that_is_slower_without_collectives_is_named(tmp_path: Path) -> None:
    nodes = make_nodes(tmp_path, 2)
    for second in range(200):
        nodes[0].step(10 * second, 10 * second)
        nodes[1].step(10 * second, 5 * second)
        nodes[0].loop.run(1.0)
    status = nodes[0].look()
    assert [(each.global_rank, each.host, each.late_s) for each in status.slow_ranks] == [(3, "host-1", 0.1)]
    nodes[1].pids = nodes[0].pids = {}
    assert nodes[0].look(5.0).slow_ranks[0].late_fraction > 0.3, "ranks that have ended have no rate"


@pytest.mark.parametrize("rate", [5e-324, -5e-324, -1e12, 1e12])
def test_a_node_that_lies_about_its_rate_ends_no_status(tmp_path: Path, rate: float) -> None:
    nodes = make_nodes(tmp_path, 2)
    step_all(nodes, *range(3), each_s=1.0)
    nodes[1].plane.close()
    leader = nodes[0].leader
    told = leader.summaries[1]
    lie = unpack(told.text)
    lie = replace(lie, ranks=tuple(replace(rank, rate=rate, step=0, total=1000) for rank in lie.ranks))
    leader.summaries[1] = replace(told, text=pack(lie))
    for second in range(100):
        nodes[0].step(second + 3, second + 3)
        status = nodes[0].look()
    assert nodes[0].troubles == []
    assert status.step == 0


@pytest.mark.parametrize("is_last_look", [False, True])
def test_a_fault_of_the_plane_is_one_line_and_ends_no_job(node, monkeypatch, is_last_look) -> None:
    node.step(5, 5)
    node.look()
    monkeypatch.setattr(node, "observe", lambda: 1 / 0)
    if not is_last_look:
        node.loop.run(30.0)
    node.plane.look()
    node.log.write("agent_ended", exit_code=0)
    node.log.close()
    assert ["status.json is no" in each for each in node.troubles] == [True]


def test_a_driver_without_a_function_takes_only_its_own_numbers_away(node, monkeypatch) -> None:
    def read() -> None:
        raise AttributeError("undefined symbol: nvmlDeviceGetMemoryInfo")

    monkeypatch.setattr(node.plane, "_devices", SimpleNamespace(read=read, close=lambda: None))
    for step in range(6):
        node.step(step, step)
        status = node.look()
    assert (status.ranks[0].step, status.ranks[0].gpu, node.troubles) == (5, None, [])
    assert status.ranks[0].memory_bytes is not None


def test_looks_that_take_long_are_few(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    observe = node.observe

    def take_long() -> object:
        looks.append(node.loop.at_s)
        node.used_s += 0.1
        return observe()

    monkeypatch.setattr(node, "observe", take_long)
    node.loop.run(100.0)
    assert 9 <= len(set(looks)) <= 11, "a hundredth of the time"


def test_a_driver_that_hangs_takes_only_its_own_numbers_away(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.look(3.0)
    assert node.look(6.0).ranks[0].memory_bytes is not None
    monkeypatch.setattr(node.loop, "call_in_thread", lambda *_arguments: None)
    for step in range(20):
        node.step(step, step)
        status = node.look()
    assert (status.ranks[0].step, status.ranks[0].memory_bytes) == (19, None)


# -- the first step of an attempt -------------------------------------------------------------------------------------


def list_steps(node: Node) -> list[tuple[int, float, object]]:
    """Of its records of steps: round, when, and how many were done."""
    records = [each for each in node.log._kept if each.what == "steps_done"]
    return [
        (each.round, round(each.monotonic_s - float(str(each.detail["ago_s"])), 2), each.detail["done"])
        for each in records
    ]


def test_the_first_step_of_an_attempt_is_exact_however_late_it_is_looked_for(node: Node) -> None:
    node.loop.run(0.35)
    for step in range(5):
        node.step(step, step)
        node.loop.run(0.1)
    node.look()
    assert list_steps(node) == [(1, 100.35, 1), (1, 100.75, 5)]
    goodput = node.told[-1].goodput
    assert (node.told[-1].time_to_start_s, goodput.productive_s) == (0.35, 0.5), "the first one as long as the others"
    node.restart("rank 1 exited with code 1", 2)
    node.loop.run(0.2)
    for step in range(5, 8):
        node.step(step, step)
        node.loop.run(0.1)
    node.look()
    [recovery] = node.told[-1].recoveries
    assert dict(recovery.parts_s) == {"detect": 1.1, "restart": 0.1}, "which needs a step of 0.1 s"
    assert list_steps(node)[2:] == [(2, 102.05, 6), (2, 102.25, 8)]


def test_the_first_step_of_a_round_that_has_ended_before_any_look_is_known(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.plane.close()
    node.loop.run(0.3)
    node.step(0, 0)
    node.loop.run(0.2)
    node.step(1, 1)
    node.log.write("round_broken", kind="failure", reason="rank 1 exited with code 1")
    node.loop.run(0.1)
    node.begin_plane()
    assert list_steps(node) == [(1, 100.3, 1), (1, 100.5, 2)]
    node.log.write("workers_stopped")
    node.form(2, 1)
    node.write_round()
    node.loop.run(0.4)
    node.step(2, 2)
    [recovery] = node.look().recoveries
    assert dict(recovery.parts_s) == {"stop": 0.1, "restart": 0.2}


def test_steps_of_the_next_round_are_not_those_of_a_round_that_ended_before_the_first_look(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.plane.close()
    node.loop.run(0.3)
    node.restart("rank 1 exited with code 1", 2)
    node.loop.run(0.3)
    node.step(0, 0)
    node.begin_plane()
    assert list_steps(node) == []
    status = node.look()
    assert (status.time_to_start_s, list_steps(node)[0]) == (0.6, (2, 100.6, 1))


def test_the_last_rank_of_all_nodes_says_when_the_first_step_was_done(tmp_path: Path) -> None:
    first, second = nodes = make_nodes(tmp_path, 2)
    first.leader.knows_ages = True
    first.loop.run(0.2)
    first.step(0, 0)
    first.loop.run(0.5)
    second.step(0, 0)
    first.loop.run(0.1)
    for each in nodes:
        each.step(1, 1)
    first.loop.run(2.0)
    assert list_steps(first)[:2] == [(1, 100.7, 1), (1, 100.8, 2)]
    assert first.told[-1].time_to_start_s == 0.7


def test_a_node_that_has_told_nothing_yet_has_done_no_step(tmp_path: Path) -> None:
    """The leader took its own first step for that of all ranks when it looked before another node had told."""
    nodes = make_nodes(tmp_path, 2)
    nodes[0].leader.is_busy = nodes[0].leader.knows_ages = True
    nodes[0].loop.run(0.3)
    nodes[0].step(0, 0)
    nodes[0].look(2.0)
    assert list_steps(nodes[0]) == []
    nodes[1].step(0, 0)
    nodes[0].leader.is_busy = False
    assert nodes[0].look(2.0).time_to_start_s == 2.3


def test_what_others_have_told_before_the_round_ended_is_not_how_far_the_job_was(tmp_path: Path) -> None:
    nodes = make_running(tmp_path, 2)
    for node in nodes:
        node.step(8, 8)
    nodes[0].log.write("round_broken", kind="membership", reason="node 1 (host-1) left: received SIGTERM")
    nodes[0].log.write("workers_stopped")
    nodes[0].log.write("agent_ended", exit_code=143)
    assert [done for _, _, done in list_steps(nodes[0])][-1] == 9
    for node in nodes:
        node.page.close()


def test_what_a_page_says_of_its_first_step_may_be_anything(node: Node) -> None:
    node.step(3, 3)
    for first, first_ns in ((-1, 5), (2**63 - 1, 5), (1, -(2**63)), (5, 2**63 - 1)):
        node.set_word(0, Layout.FIRST, first)
        node.set_word(0, Layout.FIRST_NS, first_ns)
        status = node.look()
        assert (status.step, status.time_to_start_s is not None) == (3, True)
