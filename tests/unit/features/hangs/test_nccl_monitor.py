"""What NCCL's own monitor says, from a stand-in that speaks its formats (`doubles.nccl_monitor`)."""

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import pytest
from doubles.nccl_monitor import Communicator, Job, Rank, Server, render_json, render_text

from muster._shared.records import replace as replace_record
from muster._shared.reports import ENDED, Collective, Group, Launches, RankView, Stack
from muster.agent.features.hangs import monitor as monitor_module
from muster.agent.features.hangs.judge import explain_hang, find_verdict
from muster.agent.features.hangs.monitor import Monitor, ask, count_launches
from muster.agent.features.hangs.monitor_reports import read_report
from muster.agent.features.hangs.nccl_launches import find_launch_cause
from muster.agent.features.hangs.variables import reserve_monitor_address

NAME = "27a079b828ff1a75"
TEXTS = [(2, 24, 3), (2, 26, 2), (2, 27, 7)]
JSONS = [(2, 28, 7), (2, 28, 9), (2, 29, 3), (2, 30, 7)]
FIVE, SIX = (2, 0, 0, 0, 5), (2, 0, 0, 0, 6)


def build(*ranks: Rank, version: tuple[int, int, int] = (2, 29, 3)) -> Job:
    """A job of one communicator; the processes are 100, 101, ..."""
    numbered = tuple(replace(each, number=number, pid=100 + number) for number, each in enumerate(ranks))
    return Job(communicators=(Communicator(ranks=numbered),), version=version)


def rank(counts: tuple[int, ...] = SIX, **more: object) -> Rank:
    return Rank(number=0, pid=0, counts=counts, **more)  # type: ignore[arg-type]


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(monitor_module.time, "monotonic", lambda: made.now_s)
    monkeypatch.setattr(monitor_module.time, "sleep", lambda _: None)
    return made


@pytest.fixture
def see(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[RankView]]:
    """What all nodes, of one rank each, tell of two reports one second apart."""

    def see_all(first: Job, second: Job | None = None) -> list[RankView]:
        size = len(first.processes)
        nodes = [Monitor("nowhere:1", size) for _ in range(size)]
        launches: dict[int, tuple[Launches, ...]] = {}
        for job in (first, second or first):
            clock.now_s += 1.0
            is_json = job.version >= (2, 28, 7)
            text = (render_json(job) if is_json else render_text(job)).encode()
            monkeypatch.setattr(monitor_module, "ask", lambda *_, text=text: text)
            for number, node in enumerate(nodes):
                launches[number] = node.look({100 + number: [(100 + number, 1)]}).get(100 + number, ())
        return [
            RankView(global_rank=number, node=number, host=f"n{number}", launches=launches[number])
            for number in range(size)
        ]

    return see_all


def explain(views: list[RankView]) -> tuple[list[int], str] | None:
    found = find_launch_cause(views)
    return None if found is None else (sorted(found.ranks), found.clause)


@pytest.mark.parametrize("version", [*TEXTS, *JSONS])
@pytest.mark.parametrize("size", [2, 4, 32])
def test_a_rank_that_did_not_launch(version, size, see) -> None:
    """2.24 counts all operations together. Ranks that a text does not list are those of a communicator of all ranks."""
    ranks = [rank(FIVE if number == 1 else SIX) for number in range(size)]
    rest = "rank 0 has" if size == 2 else f"ranks 0, 2-{size - 1} have"
    operation = "operation #8" if version < (2, 26, 0) else "AllReduce #6"
    text = f"did not launch {operation} of NCCL communicator {NAME} ({size} ranks); {rest} launched it"
    assert explain(see(build(*ranks, version=version))) == ([1], text)


def test_a_rank_that_launched_nothing(see: Callable[..., list[RankView]]) -> None:
    ranks = [rank((0, 0, 0, 0, 0)), rank((0, 0, 0, 0, 1)), rank((0, 0, 0, 0, 1))]
    for version in (*TEXTS[1:], *JSONS):
        found = explain(see(build(*ranks, version=version)))
        assert (found[0], found[1][:27]) == ([0], "did not launch AllReduce #1"), version


@pytest.mark.parametrize("version", [*TEXTS[1:], *JSONS])
def test_another_operation(version: tuple[int, int, int], see: Callable[..., list[RankView]]) -> None:
    ranks = [rank(SIX), rank((3, 0, 0, 0, 5)), rank(SIX)]
    text = f"launched Broadcast #3 of NCCL communicator {NAME} (3 ranks) where ranks 0, 2 have launched AllReduce #6"
    assert explain(see(build(*ranks, version=version))) == ([1], text)


@pytest.mark.parametrize("version", [*TEXTS, *JSONS])
@pytest.mark.parametrize("lost", ["silent", "dead"])
def test_a_process_that_does_not_answer_the_others(version, lost, see) -> None:
    ranks = [rank(), rank(lost=lost), rank()]
    found = explain(see(build(*ranks, version=version)))
    assert found is not None
    words = "does not answer NCCL's monitor" if lost == "silent" else "is dead to NCCL's monitor"
    assert found == ([1], f"{words}; it is in NCCL communicator {NAME} (3 ranks) with ranks 0, 2")


@pytest.mark.parametrize("version", [*TEXTS, *JSONS])
def test_all_have_launched_the_same(version: tuple[int, int, int], see: Callable[..., list[RankView]]) -> None:
    found = explain(see(build(rank(), rank(), version=version)))
    assert found[0] == []
    since = "none since" if version >= (2, 28, 7) else "whether any since this NCCL does not say"
    assert found[1].endswith(f", and {since}: the network or a device hangs, or they compute without NCCL")


@pytest.mark.parametrize("version", [*TEXTS, *JSONS])
def test_one_report_is_no_verdict_and_neither_are_two_that_differ(version, see) -> None:
    first, second = build(rank(FIVE), rank(SIX)), build(rank(SIX), rank((2, 0, 0, 0, 7)))
    assert explain(see(replace(first, version=version), replace(second, version=version))) is None


def test_a_communicator_that_ranks_leave_is_left_alone(see: Callable[..., list[RankView]]) -> None:
    for version in (*TEXTS, *JSONS):
        assert explain(see(build(rank(is_ending=True), rank(FIVE), rank(lost="left"), version=version))) is None


def test_ranks_that_have_not_joined(see: Callable[..., list[RankView]]) -> None:
    waiting = rank((0, 0, 0, 0, 0), init_state=7)
    views = see(Job(communicators=(Communicator(ranks=(replace(waiting, pid=100),)),)))
    views.append(RankView(global_rank=1, node=1, host="n1"))
    views[0] = RankView(
        global_rank=0,
        node=0,
        host="n0",
        launches=tuple(
            Launches(communicator=NAME, size=2, state=each.state, still_s=1.0) for each in views[0].launches
        ),
    )
    text = f"did not join NCCL communicator {NAME} (2 ranks), for which rank 0 has waited"
    assert explain(views) == ([1], text)


def test_an_error_that_a_rank_has_told(see: Callable[..., list[RankView]]) -> None:
    for version in (*TEXTS, *JSONS):
        found = explain(see(build(rank(), rank(async_error=6), version=version)))
        assert found[0] == [1], version
        assert found[1].startswith("reported 'Remote process "), version


def test_sets_of_which_no_rank_is_listed_name_nobody(see: Callable[..., list[RankView]]) -> None:
    found = explain(see(build(rank(FIVE), rank(SIX), rank(FIVE), rank(SIX), version=(2, 27, 7))))
    text = f"some launched AllReduce #6 of NCCL communicator {NAME} (4 ranks), some AllReduce #5 at most"
    assert found == ([], f"are known to NCCL's monitor: {text}; this NCCL does not say which")


@pytest.mark.parametrize(("behind", "named"), [(2, [2]), (None, [1])])
def test_a_rank_that_waits_in_another_communicator_is_not_the_cause(behind, named, see) -> None:
    """Rank 0 waits for rank 1 in the pair. In the world all wait for rank `behind`, or all have launched the same."""
    pair = Communicator(ranks=(Rank(number=0, pid=100, counts=SIX), Rank(number=1, pid=101, counts=FIVE)), name="aa")
    ranks = tuple(Rank(number=n, pid=100 + n, counts=FIVE if n == behind else SIX) for n in (0, 1, 2))
    found = explain(see(Job(communicators=(pair, Communicator(ranks=ranks, name="bb")))))
    assert found[0] == named, found


def test_a_rank_that_has_ended(see: Callable[..., list[RankView]]) -> None:
    views = see(build(rank(), rank(lost="silent")))
    views[1] = RankView(global_rank=1, node=0, host="n0", state=ENDED)
    text = f"has ended; it is in NCCL communicator {NAME} (2 ranks) with rank 0"
    assert explain([views[0], views[1]]) == ([1], text)


def test_ranks_that_agree_are_judged_by_what_else_they_show(see: Callable[..., list[RankView]]) -> None:
    """They may compile, or compute without NCCL."""
    assert count_launches(see(build(rank(), rank()))[0].launches) is None
    counted = count_launches(see(build(rank(FIVE), rank()))[0].launches)
    assert counted is not None
    assert counted != count_launches(see(build(rank(FIVE), rank((2, 0, 0, 0, 7))))[0].launches)


# -- by a socket


@pytest.fixture
def job() -> Job:
    return build(rank(FIVE), rank(), version=(2, 29, 3))


SESSIONS = {100: [(100, 1)], 101: [(90, 1), (101, 1)]}


@pytest.mark.parametrize("version", [*TEXTS, *JSONS])
def test_an_answer_by_a_socket(version: tuple[int, int, int], job: Job) -> None:
    with Server(lambda: replace(job, version=version)) as server:
        found = Monitor(server.address, 2).look_twice(SESSIONS)
    assert {pid: each[0].counts[-1].by_rank for pid, each in found.items()} == (
        {100: 7, 101: 8} if version < (2, 26, 0) else {100: 5, 101: 6}
    )
    assert all(each[0].still_s > 0.0 for each in found.values())
    assert server.asked == 2


def test_another_jobs_answer_on_the_same_port_is_not_taken(job: Job) -> None:
    """The kernel chooses who answers: it is asked again, and where only the other job is there, nothing is known."""
    stranger = Job(communicators=(Communicator(ranks=tuple(Rank(number=n, pid=500 + n) for n in range(3))),))
    for version in ((2, 27, 7), (2, 29, 3)):
        with Server(lambda version=version: replace(stranger, version=version)) as other:
            assert Monitor(other.address, 2).look(SESSIONS) == {}
            assert other.asked == 4
            with Server(lambda version=version: replace(job, version=version), address=other.address):
                found = [Monitor(other.address, 2).look(SESSIONS) for _ in range(12)]
        assert {len(each) for each in found} <= {0, 2}
        assert any(found)


def test_the_same_process_numbers_on_another_host_are_not_ours(job: Job) -> None:
    far = Job(
        communicators=tuple(
            replace(each, ranks=tuple(replace(one, host="203.0.113.7") for one in each.ranks))
            for each in job.communicators
        )
    )
    with Server(lambda: far) as server:
        assert Monitor(server.address, 3).look(SESSIONS) == {}


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda _: b"",
    "cut": lambda text: text[: len(text) // 2],
    "other": lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "binary": lambda _: bytes(range(256)) * 100,
    "deep": lambda _: b"{\n" + b'"a":[' * 5000,
    "wrong types": lambda _: (
        b'{\n"nccl_version": 3, "communicators": [1, {"ranks": [null, {"status": 7, "pid": "x"}]}]}'
    ),
    "no object": lambda _: b"[\n]",
    "numbers": lambda text: text.replace(b"100", b"1e999").replace(b"101", b"-7"),
}


@pytest.mark.parametrize("version", [(2, 27, 7), (2, 29, 3)])
@pytest.mark.parametrize("how", DAMAGES)
def test_damage_says_nothing(version: tuple[int, int, int], how: str, job: Job) -> None:
    with Server(lambda: replace(job, version=version), damage=DAMAGES[how]) as server:
        found = Monitor(server.address, 3).look(SESSIONS)
    assert all(not each.counts for launches in found.values() for each in launches), found


def test_a_monitor_that_is_slow_or_silent_costs_its_deadline_and_no_more(job: Job) -> None:
    for server in (Server(lambda: job, is_silent=True), Server(lambda: job, delay_s=30.0)):
        with server:
            began_s = time.monotonic()
            assert Monitor(server.address, 2).look(SESSIONS, deadline_s=0.2) == {}
            assert time.monotonic() - began_s < 5.0


def test_where_nobody_listens_there_is_no_answer() -> None:
    with ExitStack() as stack:
        address = reserve_monitor_address(stack)
        assert address is not None
        assert ask(address, time.monotonic() + 5.0) is None, "a port that is reserved takes no connection"
    for address in ("127.0.0.1:x", "127.0.0.1:99999", "", "[::1]:1"):
        assert ask(address, time.monotonic() + 5.0) is None


def test_workers_may_listen_on_the_reserved_port_and_nobody_else(job: Job) -> None:
    with ExitStack() as stack:
        address = reserve_monitor_address(stack)
        with Server(lambda: job, address=address), Server(lambda: job, address=address):
            assert len(Monitor(address, 2).look(SESSIONS)) == 2
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", int(address.rpartition(":")[2])))


def test_a_death_is_told_once_and_at_once(job: Job) -> None:
    with Server(lambda: job) as server:
        monitor = Monitor(server.address, 2)
        assert monitor.read_deaths() == []
        wait_until(lambda: bool(server.listeners))
        server.tell_death(job.processes[1])
        found: list[str] = []
        wait_until(lambda: found.extend(monitor.read_deaths()) or bool(found))
        assert found == ["process 101 on 127.0.0.1"]
        assert monitor.read_deaths() == []
        monitor.stop_listening()
        monitor.stop_listening()
    assert monitor.read_deaths() == [], "nobody listens any more"


def test_an_older_nccl_is_asked_for_events_once(job: Job) -> None:
    with Server(lambda: replace(job, version=(2, 28, 9))) as server:
        monitor = Monitor(server.address, 2)
        wait_until(lambda: monitor.read_deaths() == [] and not monitor._has_events)
        assert monitor.read_deaths() == []
        monitor.stop_listening()


def wait_until(check: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20.0
    while not check():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_what_is_cut_is_no_report() -> None:
    text = render_text(build(rank(FIVE), rank(), version=(2, 27, 7))).encode()
    assert read_report(text) is not None
    assert read_report(text[: text.index(b"Warnings")]) is None


# -- with torch's recorder and the stacks

ELSEWHERE = 'Current thread 0x1 (most recent call first):\n  File "/app/main.py", line 9 in load\n'
WAITING = (
    "Current thread 0x1 (most recent call first):\n"
    '  File "/lib/torch/distributed/distributed_c10d.py", line 3252 in all_reduce\n'
    '  File "/app/main.py", line 7 in main\n'
)


def add_stacks(views: list[RankView], *texts: str, groups: tuple[Group, ...] = ()) -> list[Stack]:
    return [
        Stack(
            global_rank=view.global_rank,
            node=view.node,
            local_rank=0,
            text=text,
            view=replace_record(view, groups=groups[number : number + 1], is_answering=True, has_server=True),
        )
        for number, (view, text) in enumerate(zip(views, texts, strict=True))
    ]


def entered(number: int) -> Group:
    entry = Collective(number=6, operation="all_reduce", sizes="", age_s=60.0, is_done=False)
    return Group(
        name="0", description="default_pg", entered=number, completed=5, entries=(entry,) if number == 6 else ()
    )


def test_what_torchs_recorder_names_goes_first(see: Callable[..., list[RankView]]) -> None:
    stacks = add_stacks(see(build(rank(FIVE), rank())), WAITING, ELSEWHERE, groups=(entered(6), entered(5)))
    found = explain_hang(stacks)
    assert "all_reduce #6 of default_pg" in found.clause
    assert found.ranks == {1}


def test_what_the_recorder_cannot_name_the_monitor_does(see: Callable[..., list[RankView]]) -> None:
    """As inside a captured graph, which the recorder has once."""
    stacks = add_stacks(see(build(rank(), rank(FIVE))), WAITING, ELSEWHERE, groups=(entered(6), entered(6)))
    found = explain_hang(stacks)
    assert found.ranks == {1}
    assert "launch AllReduce #6" in found.clause
    assert found.clause.endswith("; last seen at main.py:9")


def test_a_rank_that_is_behind_and_waits_itself_is_shown_where(see: Callable[..., list[RankView]]) -> None:
    found = explain_hang(add_stacks(see(build(rank(), rank(FIVE))), ELSEWHERE, WAITING))
    assert "at main.py:7, in all_reduce" in found.clause


def test_where_all_have_launched_the_same_the_stacks_tell_more(see: Callable[..., list[RankView]]) -> None:
    views = see(build(rank(), rank()))
    found = explain_hang(add_stacks(views, WAITING, ELSEWHERE))
    assert (found.ranks, found.clause) == (
        {1},
        "did not enter all_reduce (main.py:7), where rank 0 waits; last seen at main.py:9",
    )
    equal = explain_hang(add_stacks(views, ELSEWHERE, ELSEWHERE))
    assert equal.clause.startswith("launched the same ")
    assert equal.clause.endswith("compute without NCCL")


def test_where_all_have_launched_the_same_outside_torch_distributed_each_line_is_named(see) -> None:
    """As on a GPU: the replay of a CUDA graph counts as no launch, and one rank waits for its device."""
    apart = explain_hang(add_stacks(see(build(rank(), rank())), ELSEWHERE, ELSEWHERE.replace("line 9", "line 31")))
    assert apart.ranks == {0, 1}
    assert apart.clause.endswith("at main.py:9, rank 1 at main.py:31")


def test_too_young_a_standstill_is_no_verdict_where_a_person_asks(see: Callable[..., list[RankView]]) -> None:
    """The two reports of a look are one second apart; a third, five seconds later, knows since when."""
    stacks = add_stacks(see(build(rank(FIVE), rank())), ELSEWHERE, WAITING)
    assert find_verdict(stacks) is None
    old = [
        replace_record(
            each,
            view=each.view
            and replace_record(
                each.view, launches=tuple(replace_record(one, still_s=6.0) for one in each.view.launches)
            ),
        )
        for each in stacks
    ]
    assert "n0) did not launch" in (find_verdict(old) or "")
