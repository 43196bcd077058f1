"""Where the output of a rank is, from records of agents."""

import json
from pathlib import Path

import pytest

from muster._shared.contract import FORMAT
from muster.agent.runtime.event_log import ConsoleSink, EventLog
from muster.agent.runtime.loop import SystemClock
from muster.cli.history.sources import RankProcess, list_processes, parse_files
from muster.cli.log_command import (
    FILES,
    find_first_failure,
    find_rank,
    find_waited_for,
    find_world_size,
    follow_files,
    names_rank,
    select_rank,
)

USUAL = {"format": FORMAT, "time_s": 1.0, "monotonic_s": 1.0, "node_index": 0, "round": 1, "attempt": 0}


def write(*events):
    return b"".join(json.dumps({**USUAL, **each}).encode() + b"\n" for each in events)


def parse(content):
    return parse_files(iter([("events.jsonl", content)]))


def start(node, attempt, *ranks):
    return {"what": "workers_started", "node_index": node, "attempt": attempt, "ranks": list(ranks)}


def fail(attempt, time_s, rank):
    return {"what": "worker_failed", "time_s": time_s, "attempt": attempt, "ranks": [rank]}


def place(rank, node, local, attempt):
    return RankProcess(global_rank=rank, node_index=node, local_rank=local, attempt=attempt)


RECORDS = write(start(0, 0, 0, 1), start(1, 0, 2, 3), fail(0, 5.0, 3), start(1, 1, 0, 1), start(0, 1, 2, 3))


def test_a_rank_is_on_the_node_of_its_attempt():
    assert find_rank(parse(RECORDS), 3) == place(3, 0, 1, 1), "a lost node has changed the ranks"
    assert find_rank(parse(RECORDS), 3, 0) == place(3, 1, 1, 0)
    assert find_rank(parse(RECORDS), 9) is find_rank(parse(RECORDS), 3, 2) is None
    assert find_rank(parse(RECORDS), 3).list_paths("stderr.log") == [
        "node_0/attempt_1/1/stderr.log",
        "attempt_1/1/stderr.log",
    ]


def test_the_size_of_the_largest_round_as_an_agent_records_it():
    lines = []
    log = EventLog(SystemClock(), [ConsoleSink(lines.append)])
    for size in (2, 4, 3):
        log.write("round_formed", world_size=size)
    assert find_world_size(parse("\n".join(lines).encode())) == 4
    assert find_world_size(parse(write({"what": "round_formed"}))) == find_world_size(parse(RECORDS)) == 0


def test_the_first_failure_of_the_last_attempt_that_failed():
    assert find_first_failure(parse(RECORDS)) == (3, 0)
    more = RECORDS + write(fail(1, 9.0, 1), fail(1, 8.0, 2))
    assert find_first_failure(parse(more)) == (2, 1)
    assert find_first_failure(parse(write(start(0, 0, 0)))) is None
    hung = {**fail(2, 9.5, 5), "what": "hang_explained"}
    assert find_first_failure(parse(more + write(hung))) == (5, 2), "it has kept the others waiting"


@pytest.mark.parametrize("what", ["stood_still", "hang_named"])
def test_a_rank_that_keeps_the_others_waiting_until_the_job_is_cancelled(what):
    still = {**fail(1, 9.0, 3), "what": what}
    assert find_waited_for(parse(write(still))) == (3, 1)
    assert find_waited_for(parse(write(still, {**still, "what": "round_broken"}))) == (3, 1), "a cancel"
    for over in ("moved_again", "hang_ended", "round_formed"):
        assert find_waited_for(parse(write(still, {**still, "what": over}))) is None
    assert find_waited_for(parse(write({**still, "ranks": []}))) is find_waited_for(parse(RECORDS)) is None


@pytest.mark.parametrize(
    "damage",
    [
        b'{"what": "workers_started"',
        b"[1]",
        write({**start(0, 0), "ranks": "x"}),
        write({**start(0, 0, 0), "attempt": None}),
        write({**fail(0, 1.0, 0), "ranks": []}),
        b"\xff\xfe",
    ],
)
def test_damaged_records_are_left_out(damage):
    assert len(list_processes(parse(damage + b"\n" + RECORDS))) == 8
    assert find_first_failure(parse(damage)) is None


def test_lines_of_a_rank_in_the_output_of_a_node():
    lines = ["[t1|n1.r3]:a\n", "[t0|n1.r2]:b\n", "plain\n", "[t1|n1.r3]:c\n"]
    assert list(select_rank(lines, 3)) == ["a\n", "c\n"]
    assert list(select_rank(["[main0]:a\n", "[main1]:b\n"], 1)) == ["b\n"]
    assert list(select_rank(["[main0-2|n1.r4-6]:a\n", "[main3|n1.r7]:b\n"], 5)) == ["a\n"], "collapsed by the agent"


@pytest.mark.parametrize("role", ["llama3", "llama3-8", "v2,1", "8"])
def test_a_rank_of_a_role_whose_name_ends_in_digits(role: str) -> None:
    lines = [f"[{role}:{local}]:from {local}\n" for local in range(12)]
    assert [list(select_rank(lines, rank)) for rank in (1, 11)] == [["from 1\n"], ["from 11\n"]]
    assert list(select_rank([f"[{role}:0-2,5]:a\n", f"[{role}:3]:b\n"], 5)) == ["a\n"]


def test_a_line_that_several_ranks_have_said_is_each_ones():
    assert [rank for rank in range(9) if names_rank("0-2,5,7-8", rank)] == [0, 1, 2, 5, 7, 8]
    assert [rank for rank in range(9) if names_rank("3", rank)] == [3]


class Job:
    """A run's folder that changes at each look."""

    def __init__(self, folder: Path, *looks):
        self.folder, self.looks = folder, list(looks)

    def sleep(self, seconds):
        self.looks.pop(0)()

    def has_ended(self):
        return not self.looks

    def append(self, name, data):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.write(data)


def test_following_goes_on_in_the_next_attempt_and_ends_with_the_job(tmp_path):
    job = Job(tmp_path)
    out = "node_0/attempt_{}/1/stdout.log"
    job.append("events.jsonl", write(start(0, 0, 0, 1)))
    job.append(out.format(0), b"one\ntw")
    job.looks = [
        lambda: job.append(out.format(0), b"o\n"),
        lambda: (job.append("events.jsonl", write(start(0, 1, 0, 1))), job.append(out.format(0), b"late\n")),
        lambda: job.append(out.format(1), b"again\nno end"),
    ]
    lines = list(follow_files(tmp_path, 1, None, tuple(FILES.values()), job.has_ended, job.sleep))
    assert lines == ["one\n", "two\n", "late\n", "again\n", "no end"]


def test_nothing_is_read_through_a_link(tmp_path):
    (tmp_path / "secret").write_text("secret\n")
    job = Job(tmp_path)
    job.append("events.jsonl", write(start(0, 0, 0)))
    (tmp_path / "attempt_0/0").mkdir(parents=True)
    (tmp_path / "attempt_0/0/stdout.log").symlink_to(tmp_path / "secret")
    assert list(follow_files(tmp_path, 0, None, ["stdout.log"], job.has_ended, job.sleep)) == []
