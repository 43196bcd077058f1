"""What is read of workers, with answers of their servers that are made up."""

import json
import os
from collections.abc import Iterator

import pytest

from muster.agent.diagnosis.hangs import servers
from muster.agent.diagnosis.hangs.collectives import find_cause
from muster.agent.diagnosis.hangs.servers import Answer, Place, WorkerReader
from muster.agent.diagnosis.report import Collective, Group

SESSIONS = {7: [(7, 1)]}
ENTERED = Group(name="0", description="default_pg", entered=3, completed=2)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Answer]]:
    given: dict[int, Answer] = {}
    monkeypatch.setattr(servers, "find_places", dict.fromkeys)
    monkeypatch.setattr(servers, "read_workers", lambda places, handlers: dict(given))
    return given


def test_a_worker_that_has_come_back_from_its_process_group_is_judged_by_what_it_shows(
    answers: dict[int, Answer],
) -> None:
    """torch before 2.10 shows no collectives: it must not count as hung in init_process_group for ever."""
    reader = WorkerReader(4.0)
    answers[7] = Answer(has_begun=True, is_initialising=True)
    assert reader.read_progress(SESSIONS) == {7: ()}
    answers[7] = Answer()  # it does not answer now
    assert reader.read_progress(SESSIONS) == {7: ()}
    answers[7] = Answer(has_begun=True)
    assert reader.read_progress(SESSIONS) == {}


def test_collectives_that_were_seen_stay_when_the_recorder_is_empty(answers: dict[int, Answer]) -> None:
    reader = WorkerReader(4.0)
    answers[7] = Answer(has_begun=True, groups=(ENTERED,))
    assert reader.read_progress(SESSIONS) == {7: (3, 2)}
    answers[7] = Answer(has_begun=True)
    assert reader.read_progress(SESSIONS) == {7: (3, 2)}


@pytest.mark.parametrize(
    ("state", "clause"),
    [
        ("D", "is in an uninterruptible system call"),
        ("T", "is stopped (SIGSTOP)"),
        ("t", "is stopped by a debugger"),
        ("S", "does not answer"),
    ],
)
def test_a_worker_that_does_not_answer_is_named_with_its_state(
    state: str, clause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's states are made up: nothing here can be brought into D. The others wait in all-reduce 3."""
    monkeypatch.setattr("muster._processes.read_stat", lambda pid: [state if pid == 8 else "S"])
    monkeypatch.setattr(servers, "_has_groups", lambda pid: True)
    places = servers.find_places({7: [(7, 1)], 8: [(8, 1)]})
    waits = Collective(number=3, operation="all_reduce", sizes="", age_s=62.0, is_done=False)
    entered = Group(name="0", description="default_pg", entered=3, completed=2, ranks=(0, 1), entries=(waits,))
    answers = {7: Answer(groups=(entered,), has_begun=True, is_answering=True), 8: Answer(has_begun=True)}
    found = find_cause(
        servers.build_view(places[pid], answers[pid], global_rank=rank, node=0, host="h")
        for rank, pid in enumerate((7, 8))
    )
    assert found is not None
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
    place = Place(pid=os.getpid(), state="S", server_pid=os.getpid())

    def read(*handlers: tuple[str, ...]) -> list[tuple[str, str, int]]:
        asked.clear()
        found = servers.read_workers({0: place}, *handlers)[0]
        assert found.is_answering
        return [(group.name, group.description, group.entered) for group in found.groups]

    assert read() == [("0", "default_pg", 2), ("0 nccl", "default_pg", 40)]
    assert read(servers._LOOK) == [("0", "default_pg", 2)]
    assert asked == ["fr_trace_json"], "asking NCCL's again and again would end the capture of CUDA graphs"
    del dumps["fr_trace_json"]  # torch 2.6 to 2.9
    assert read() == [("0", "default_pg", 0), ("0 nccl", "default_pg", 40)]
