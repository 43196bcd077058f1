"""What is read of workers, with answers of their servers that are made up."""

import json
import os
from collections.abc import Iterator

import pytest

from muster._shared.records import replace
from muster._shared.reports import Collective, Group, LaunchCount, Launches
from muster.agent.features.hangs import servers
from muster.agent.features.hangs.collectives import find_cause
from muster.agent.features.hangs.servers import Answer, Progress, WorkerReader, WorkerServer

SESSIONS = {7: [(7, 1)]}
ENTERED = Group(name="0", description="default_pg", entered=3, completed=2)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Answer]]:
    given: dict[int, Answer] = {}
    monkeypatch.setattr(servers, "find_places", dict.fromkeys)
    monkeypatch.setattr(servers, "read_workers", lambda places, handlers: dict(given))
    return given


def test_a_worker_that_has_come_back_from_its_process_group_is_judged_by_what_it_shows(answers) -> None:
    """torch before 2.10 shows no collectives: it must not count as hung in init_process_group for ever."""
    reader = WorkerReader(4.0)
    answers[7] = Answer(has_begun=True, is_initialising=True)
    assert reader.read_progress(SESSIONS, 0.0) == {7: Progress(collectives=(), is_waiting=True)}
    answers[7] = Answer()  # it does not answer now
    assert reader.read_progress(SESSIONS, 0.0) == {7: Progress(collectives=(), is_waiting=True)}
    answers[7] = Answer(has_begun=True)
    assert reader.read_progress(SESSIONS, 0.0) == {7: Progress(has_answered=False)}
    answers[7] = Answer()  # it is stopped
    assert reader.read_progress(SESSIONS, 0.0) == {7: Progress(has_answered=False)}
    answers[7] = Answer(has_begun=True, is_answering=True)
    assert reader.read_progress(SESSIONS, 0.0) == {7: Progress()}


def test_collectives_that_were_seen_stay_when_the_recorder_is_empty(answers: dict[int, Answer]) -> None:
    reader = WorkerReader(4.0)
    answers[7] = Answer(has_begun=True, is_answering=True, groups=(ENTERED,))
    assert reader.read_progress(SESSIONS, 0.0) == {7: Progress(collectives=(3, 2))}
    answers[7] = Answer(has_begun=True, is_answering=True)
    assert reader.read_progress(SESSIONS, 0.0) == {7: Progress(collectives=(3, 2))}


class Hand:
    """The reader's clocks."""

    def __init__(self) -> None:
        self.monotonic_s = 1000.0
        self.wall_s = 1_795_432_043.0

    def pass_s(self, seconds: float) -> None:
        self.monotonic_s += seconds
        self.wall_s += seconds


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    made = Hand()
    monkeypatch.setattr(servers.time, "monotonic", lambda: made.monotonic_s)
    monkeypatch.setattr(servers.time, "time", lambda: made.wall_s)
    return made


def build_waiting(age_s: float, *, took_s: float = 0.05, is_done: bool = False, timeout_s: float = 600.0) -> Answer:
    """A worker that has entered collective 3 so long ago."""
    entry = Collective(
        number=3, operation="all_reduce", sizes="", age_s=age_s, is_done=is_done, is_p2p=False, timeout_s=timeout_s
    )
    group = Group(name="0", description="default_pg", entered=3, completed=2 + is_done, entries=(entry,))
    return Answer(has_begun=True, is_answering=True, groups=(group,), took_s=took_s)


@pytest.mark.parametrize(
    ("timeout_s", "age_s", "found_s"), [(600.0, 569.0, 0.0), (600.0, 571.0, 600.0), (0.0, 9e5, 0.0)]
)
def test_a_wait_that_torch_is_about_to_end(timeout_s, age_s, found_s, answers, hand) -> None:
    reader = WorkerReader(60.0)
    answers[7] = build_waiting(age_s, timeout_s=timeout_s)
    assert reader.read_progress(SESSIONS, 0.0)[7].timeout_s == found_s


def test_a_wait_is_looked_at_again_before_it_counts(answers: dict[int, Answer], hand: Hand) -> None:
    """Workers are asked more seldom than that: the rank may have gone on since."""
    reader = WorkerReader(60.0)
    answers[7] = build_waiting(566.0)
    assert reader.read_progress(SESSIONS, 0.0)[7].timeout_s == 0.0
    answers[7] = build_waiting(1.0, is_done=True)
    hand.pass_s(5.0)
    assert reader.read_progress(SESSIONS, 0.0) == {7: Progress(collectives=(3, 3))}
    answers[7] = build_waiting(571.0)
    assert reader.read_progress(SESSIONS, 0.0)[7].timeout_s == 0.0, "asked again too soon"
    hand.pass_s(10.0)
    assert reader.read_progress(SESSIONS, 0.0)[7].timeout_s == 600.0
    answers[7] = Answer()  # it does not answer now
    hand.pass_s(10.0)
    assert reader.read_progress(SESSIONS, 0.0)[7].timeout_s == 600.0
    assert reader.read_progress({}, 0.0) == {}


def test_ages_of_a_wall_clock_that_was_set_do_not_count(answers: dict[int, Answer], hand: Hand) -> None:
    """Or of a machine that was suspended, while torch's clock stood still."""
    reader = WorkerReader(60.0)
    hand.wall_s += 8 * 3600
    answers[7] = build_waiting(8 * 3600 + 5.0)
    assert reader.read_progress(SESSIONS, 0.0)[7].timeout_s == 0.0


def test_an_operation_that_later_ones_have_passed_is_none_that_the_rank_waits_in(answers, hand) -> None:
    """What a CUDA graph has captured is never marked as done."""
    answer = build_waiting(9e5)
    later = replace(answer.groups[0].entries[0], number=4, is_done=True)
    answers[7] = replace(answer, groups=(replace(answer.groups[0], entries=(*answer.groups[0].entries, later)),))
    assert WorkerReader(60.0).read_progress(SESSIONS, 0.0)[7].timeout_s == 0.0


def test_the_recorder_of_nccl_is_read_only_of_workers_that_have_been_idle_for_nearly_the_timeout(
    monkeypatch: pytest.MonkeyPatch, hand: Hand
) -> None:
    """Reading it may end the capture of a CUDA graph. What it says is no sign of life: it is not read before."""
    asked: list[int] = []

    def read_workers(_places: object, handlers: tuple[str, ...] = servers.ALL_HANDLERS) -> dict[int, Answer]:
        asked.append(len(handlers))
        answer = build_waiting(575.0) if len(handlers) == 2 else Answer(has_begun=True, is_answering=True)
        return {7: replace(answer, device_timeout_s=600.0)}

    monkeypatch.setattr(servers, "find_places", dict.fromkeys)
    monkeypatch.setattr(servers, "read_workers", read_workers)
    reader = WorkerReader(60.0)
    assert reader.read_progress(SESSIONS, 569.0) == {7: Progress()}
    assert asked == [1]
    hand.pass_s(20.0)
    assert reader.read_progress(SESSIONS, 571.0) == {7: Progress(timeout_s=600.0)}
    assert asked == [1, 1, 2]


@pytest.mark.parametrize(
    ("state", "clause"),
    [
        ("D", "is in an uninterruptible system call"),
        ("T", "is stopped (SIGSTOP)"),
        ("t", "is stopped by a debugger"),
        ("S", "does not answer"),
    ],
)
def test_a_worker_that_does_not_answer_is_named_with_its_state(state, clause, monkeypatch) -> None:
    """The kernel's states are made up: nothing here can be brought into D. The others wait in all-reduce 3."""
    monkeypatch.setattr("muster._shared.processes.read_stat", lambda pid: [state if pid == 8 else "S"])
    monkeypatch.setattr(servers, "_has_groups", lambda pid: True)
    places = servers.find_places({7: [(7, 1)], 8: [(8, 1)]})
    waits = Collective(number=3, operation="all_reduce", sizes="", age_s=62.0, is_done=False)
    entered = Group(name="0", description="default_pg", entered=3, completed=2, ranks=(0, 1), entries=(waits,))
    answers = {7: Answer(groups=(entered,), has_begun=True, is_answering=True), 8: Answer(has_begun=True)}
    found = find_cause(
        servers.build_view(places[pid], answers[pid], global_rank=rank, node=0, host="h")
        for rank, pid in enumerate((7, 8))
    )
    assert (found.ranks, found.clause) == ({1}, f"{clause}; rank 0 has waited in all_reduce #3 of default_pg for 62 s")


@pytest.fixture
def groups_file() -> Iterator[None]:
    """As a worker's, in this process."""
    number = servers._choose_number(1)
    made = os.memfd_create("muster-groups")
    os.write(made, b'{"init": true}\n{"group": "0", "ranks": [0, 1]}\n')
    os.dup2(made, number)
    os.close(made)
    yield
    os.close(number)


def dump(name: str, number: int) -> bytes:
    entry = {"process_group": ["0", "default_pg"], "collective_seq_id": number, "profiling_name": name, "pg_id": 0}
    return json.dumps({"entries": [entry]}).encode()


@pytest.mark.usefixtures("groups_file")
def test_gloo_and_nccl_of_one_group_count_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    dumps = {"fr_trace_json": dump("gloo:barrier", 2), "dump_nccl_trace_json": dump("nccl:all_reduce", 40)}
    asked: list[str] = []

    def ask(_pid: int, handler: str, _deadline_s: float) -> bytes | None:
        asked.append(handler)
        return dumps.get(handler)

    monkeypatch.setattr(servers, "ask", ask)
    place = WorkerServer(pid=os.getpid(), state="S", server_pid=os.getpid())

    def read(*handlers: tuple[str, ...]) -> list[tuple[str, str, int]]:
        asked.clear()
        found = servers.read_workers({0: place}, *handlers)[0]
        assert found.is_answering
        return [(group.name, group.description, group.entered) for group in found.groups]

    assert read() == [("0", "default_pg", 2), ("0 nccl", "default_pg", 40)]
    assert read(servers.GLOO_HANDLERS) == [("0", "default_pg", 2)]
    assert asked == ["fr_trace_json"], "asking NCCL's again and again would end the capture of CUDA graphs"
    del dumps["fr_trace_json"]  # torch 2.6 to 2.9
    assert read() == [("0", "default_pg", 0), ("0 nccl", "default_pg", 40)]


def make_answer(*ages: float, first: int = 1, open_from: int = 99) -> Answer:
    entries = tuple(
        Collective(number=number, operation="all_reduce", sizes="", age_s=age_s, is_done=number < open_from)
        for number, age_s in enumerate(ages, start=first)
    )
    group = Group(name="0", description="default_pg", entered=0, completed=0, entries=entries)
    return Answer(groups=(group,), has_begun=True, is_answering=True)


def test_who_enters_the_collectives_last_and_by_how_much() -> None:
    # 7 has entered one that 8 has not, and 8 remembers one that 7 has forgotten
    answers = {7: make_answer(3.0, 2.0, 1.0, 0.1, first=2), 8: make_answer(9.0, 2.75, 1.75, 0.75)}
    assert servers.find_arrivals(answers) == {7: 0.0, 8: 0.25}
    assert servers.find_arrivals({7: answers[7]}) == {}
    assert servers.find_arrivals({**answers, 9: Answer()}) == {}


def test_the_collective_that_a_worker_is_in() -> None:
    assert servers.find_open(make_answer(3.0, 2.0, 1.0, open_from=3)) == ("all_reduce #3 of default_pg", 1.0)
    assert servers.find_open(make_answer(3.0, 2.0)) is None
    assert servers.find_open(Answer(has_begun=True, is_initialising=True)) == ("init_process_group", 0.0)


class Told:
    """A monitor of NCCL that tells what it is given."""

    def __init__(self) -> None:
        self.asked = 0
        self.is_listening = False
        self.deaths: list[str] = []
        self.launches = {
            7: (Launches(communicator="aa", size=2, counts=(LaunchCount(operation="", by_rank=1, least=1, most=2),)),)
        }

    def look(self, _sessions: object, deadline_s: float) -> dict[int, tuple[Launches, ...]]:
        assert deadline_s < 60.0 / 10
        self.asked += 1
        return self.launches

    def read_deaths(self) -> list[str]:
        self.is_listening = True
        found, self.deaths = self.deaths, []
        return found

    def stop_listening(self) -> None:
        self.is_listening = False


def test_nccls_monitor_is_asked_only_of_a_job_that_shows_nothing(answers: dict[int, Answer], hand: Hand) -> None:
    told, deaths = Told(), list[str]()
    reader = WorkerReader(60.0, told, deaths.append)  # type: ignore[arg-type]
    assert reader.read_progress(SESSIONS, 0.0, 0.0)[7].launches is None
    assert reader.read_progress(SESSIONS, 600.0, 14.0)[7].launches is None
    assert (told.asked, told.is_listening) == (0, False)
    assert reader.read_progress(SESSIONS, 0.0, 15.0)[7].launches == (1, 1, 2)
    assert reader.read_progress(SESSIONS, 0.0, 16.0)[7].launches == (1, 1, 2)
    assert (told.asked, told.is_listening) == (1, True), "asked again at intervals"
    hand.pass_s(8.0)
    told.deaths.append("process 9 on 10.0.0.4")
    reader.read_progress(SESSIONS, 0.0, 24.0)
    assert (told.asked, deaths) == (2, ["process 9 on 10.0.0.4"])
    assert reader.read_progress(SESSIONS, 0.0, 1.0)[7].launches is None, "it has written something"
    assert not told.is_listening
