"""`--event-log-handler`: names to sinks."""

import gc
import json
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest

from muster._shared.records import replace
from muster.agent.logs import open_own
from muster.agent.runtime.event_log import EVENT_LOG_HANDLERS, ConsoleSink, EventLog, EventRecord, JsonlSink
from muster.agent.runtime.loop import SystemClock

RECORD = EventRecord(
    time_s=1.0, monotonic_s=2.0, node=0, node_index=0, round=1, attempt=0, what="round_formed", ranks=(0, 1)
)


@pytest.mark.torch
def test_torchs_names_are_ours() -> None:
    handlers = pytest.importorskip("torch.distributed.elastic.events.handlers")
    assert set(EVENT_LOG_HANDLERS) == set(handlers._log_handlers)


def test_the_console_gets_one_object_a_line() -> None:
    lines: list[str] = []
    sink = ConsoleSink(lines.append)
    sink.write(RECORD)
    sink.write(RECORD)
    sink.close()
    assert [json.loads(line)["what"] for line in lines] == ["round_formed"] * 2
    assert json.loads(lines[0])["ranks"] == [0, 1]


def call(command: Callable[[], None]) -> None:
    """As a thread that is always quick."""
    command()


def test_each_record_is_a_line_of_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first, second = JsonlSink(str(path), call, open_own), JsonlSink(str(path), call, open_own)
    first.write(RECORD)
    second.write(RECORD)
    assert [json.loads(line)["what"] for line in path.read_text().splitlines()] == ["round_formed"] * 2
    first.close()
    second.close()


class ListSink:
    """Keeps the records."""

    def __init__(self) -> None:
        self.records: list[EventRecord] = []

    def write(self, record: EventRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.records.append(replace(RECORD, what="closed"))


def test_records_that_are_held_back_keep_their_order_and_times() -> None:
    sink, late = ListSink(), ListSink()
    log = EventLog(SystemClock(), [sink])
    log.write("round_formed")
    log.hold()
    log.write("round_broken", reason="a consequence", hang=False)
    log.write("workers_stopped")
    assert [each.what for each in sink.records] == ["round_formed"]
    log.add_sink(late, replay=True)
    log.release(reason="the cause")
    log.write("round_formed")
    names = ["round_formed", "round_broken", "workers_stopped", "round_formed"]
    assert [each.what for each in sink.records] == [each.what for each in late.records] == names
    assert sink.records[1].detail == {"reason": "the cause", "hang": False}
    times = [each.monotonic_s for each in sink.records]
    assert times == sorted(times)


def test_what_is_held_back_is_written_at_the_end() -> None:
    sink = ListSink()
    log = EventLog(SystemClock(), [sink])
    log.hold()
    log.write("round_broken")
    log.close()
    log.release()
    assert [each.what for each in sink.records] == ["round_broken", "closed"]


def test_a_full_disk_ends_the_file_and_nothing_else() -> None:
    troubles: list[str] = []
    sink = JsonlSink("/dev/full", call, open_own, troubles.append)
    sink.write(RECORD)
    assert troubles == ["cannot write /dev/full: No space left on device"]
    sink.write(RECORD)
    sink.close()
    assert len(troubles) == 1
    del sink  # a file object would write its buffer once more, and warn
    gc.collect()


def test_records_wait_for_a_slow_disk_in_order_and_for_one_that_hangs_not_for_ever(tmp_path: Path) -> None:
    path, waiting, troubles = tmp_path / "events.jsonl", deque[Callable[[], None]](), list[str]()
    sink = JsonlSink(str(path), waiting.append, open_own, troubles.append)
    for number in range(3):
        sink.write(replace(RECORD, round=number))
    assert not path.exists()
    while waiting:
        waiting.popleft()()
    assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [0, 1, 2]
    for _ in range(5000):
        sink.write(RECORD)
    assert [f"cannot write {path}: " in each for each in troubles] == [True]
    assert len(waiting) < 1100
