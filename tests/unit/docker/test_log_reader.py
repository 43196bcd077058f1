"""Reading logs across containers and through stops of the engine, with a scripted engine."""

from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace

import docker.errors
import pytest
import requests
from docker_samples import build_facts
from hypothesis import given
from hypothesis import strategies as st

from muster.schedulers.adapter.scheduler import LogRequest
from muster.schedulers.docker.driver import ENGINE_KEY
from muster.schedulers.docker.engine import Engine
from muster.schedulers.docker.running_apps.logs import LogReader, join_lines
from muster.schedulers.docker.scheduler import DockerScheduler
from muster.schedulers.docker.sdk import EngineUnavailable, translate_errors
from muster.schedulers.docker.spec import Label
from muster.schedulers.timestamps import parse_seconds
from muster.schedulers.wording.reasons import Code, Reason

OUT, ERR = 1, 2


class ScriptedEngine:
    """Containers with dated records; `steps` happen one by one whenever the reader waits.

    `breaks` lists after how many records the next readings of a log end; later readings are complete. Engines up to
    20.10 check each record's date for a reading since a time, newer ones return all after the first match.
    """

    def __init__(self, *steps, each_date=True):
        self.containers = {}
        self.steps = list(steps)
        self.breaks = []
        self.each_date = each_date

    def wait(self, _seconds):
        if self.steps:
            self.steps.pop(0)(self)

    def facts(self, number):
        status, _ = self.containers[number]
        labels, code = {Label.INCARNATION: str(number)}, 1 if status == "exited" else None
        return build_facts(id=str(number), labels=labels, status=status, exit_code=code)

    def list_containers(self, _labels):
        return [self.facts(number) for number in sorted(self.containers)]

    def inspect_container(self, container):
        return self.facts(int(container))

    def logs(self, container, *, timestamps, since_s, **_):
        left, began = self.breaks.pop(0) if self.breaks else None, False
        for time, text, stream in self.containers[int(container)][1]:
            if left == 0:
                break
            began = began and not self.each_date
            began = began or since_s is None or parse_seconds(time) >= since_s
            if began:
                yield stream, f"{time} {text}".encode() if timestamps else text.encode()
                left = None if left is None else left - 1
        if left is not None:
            raise EngineUnavailable("gone")


def record(second, text, stream=OUT, nanos=0):
    return f"2026-01-01T00:00:{second:02d}.{nanos:09d}Z", text, stream


def read(engine, over):
    return list(LogReader(engine, "a", LogRequest(role="w", index=0), wait=engine.wait, has_ended=over).lines())


def test_containers_are_read_in_order():
    engine = ScriptedEngine()
    engine.containers = {1: ("exited", [record(2, "b\n")]), 0: ("exited", [record(1, "a\n")])}
    lines = read(engine, None)
    assert lines == ["a\n", "b\n"]
    assert [line.at_s - lines[0].at_s for line in lines] == [0.0, 1.0]


def test_followed_log_goes_on_in_the_next_container():
    def replace(engine):
        engine.containers[1] = ("exited", [record(2, "b\n")])

    engine = ScriptedEngine(lambda _: None, replace)
    engine.containers = {0: ("exited", [record(1, "a\n")])}
    assert read(engine, lambda: not engine.steps) == ["a\n", "b\n"]


def test_a_reader_waits_for_a_change_of_the_app_and_for_nothing_else():
    """It asked the engine ten times a second between two containers, and waited after the end of each."""

    class Ending(ScriptedEngine):
        waits = 0

        def wait(self, seconds):
            self.waits += 1
            super().wait(seconds)

        def logs(self, container, **query):
            yield from super().logs(container, **query)
            self.containers[int(container)] = ("exited", self.containers[int(container)][1])

    engine = Ending(lambda engine: engine.containers.update({1: ("running", [record(2, "b\n")])}))
    engine.containers = {0: ("running", [record(1, "a\n")])}
    assert read(engine, lambda: not engine.steps) == ["a\n", "b\n"]
    assert engine.waits == 1


def test_a_container_that_never_ran_ends_with_the_app():
    engine = ScriptedEngine(lambda _: None)
    engine.containers = {0: ("created", [])}
    assert read(engine, lambda: not engine.steps) == []


def test_nothing_from_before_the_given_time_comes_after_a_break():
    records = [record(1, "o1\n"), record(2, "e1\n", ERR), record(3, "o2\n")]
    engine = ScriptedEngine(lambda _: None)
    engine.containers = {0: ("exited", records)}
    engine.breaks = [1]
    query = LogRequest(role="w", index=0, since=datetime.fromtimestamp(parse_seconds(records[1][0]), timezone.utc))
    lines = list(LogReader(engine, "a", query, wait=engine.wait, has_ended=lambda: not engine.steps).lines())
    assert lines == ["e1\n", "o2\n"]


@given(
    dates=st.lists(st.tuples(st.sampled_from([OUT, ERR]), st.integers(0, 400)), max_size=40),
    lag=st.integers(0, 150),
    breaks=st.lists(st.integers(0, 12), max_size=6),
    each_date=st.booleans(),
)
def test_every_record_of_both_streams_comes_once_whatever_breaks(dates, lag, breaks, each_date):
    """`dates` in hundredths of a second: a stream's own are in order, ERR's come up to 1.5 s late."""
    late = sorted(dates, key=lambda date: date[1] + (lag if date[0] == ERR else 0))
    records = [
        record(1 + hundredths // 100, f"{stream} {number}\n", stream, hundredths % 100 * 10**7)
        for number, (stream, hundredths) in enumerate(late)
    ]
    engine = ScriptedEngine(*[lambda _: None] * (len(breaks) + 1), each_date=each_date)
    engine.containers = {0: ("exited", records)}
    engine.breaks = list(breaks)
    lines = read(engine, lambda: not engine.steps)
    assert Counter(lines) == Counter(text for _, text, _ in records)
    for stream in (OUT, ERR):
        own = [line for line in lines if line.startswith(str(stream))]
        assert own == [text for _, text, each in records if each == stream]


def test_what_the_engine_says_of_a_log_has_no_date_and_ends_no_reading():
    """The daemon writes it to a stream of its own; the reader's thread died of it, and all later lines were lost."""

    class Undated(ScriptedEngine):
        def logs(self, container, **query):
            yield 3, b"Error grabbing logs: unexpected EOF\n"
            yield OUT, b"\xff no date\n"
            yield from super().logs(container, **query)

    engine = Undated(lambda _: None)
    engine.containers = {0: ("exited", [record(1, "a\n")])}
    said = ["Error grabbing logs: unexpected EOF\n", "\ufffd no date\n"]
    assert read(engine, lambda: not engine.steps) == [*said, "a\n"]


def test_lines_are_joined_and_split():
    frames = [(OUT, None, piece) for piece in (b"a", b"b\nc\xc3", b"\xa4\n\n", b"\xff", b"end")]
    assert list(join_lines(iter(frames))) == ["ab\n", "c\u00e4\n", "\n", "\ufffdend"]


def test_long_lines_of_two_streams_are_not_mixed():
    pieces = [(OUT, b"o" * 9), (ERR, b"e\xc3"), (OUT, b"oo\n"), (ERR, b"\xa4\n"), (OUT, b"rest"), (ERR, b"end")]
    frames = [(stream, None, piece) for stream, piece in pieces]
    assert list(join_lines(iter(frames))) == ["o" * 11 + "\n", "e\u00e4\n", "rest", "end"]


def test_a_log_driver_that_keeps_nothing_is_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    """`torchx run` printed no output of the job, and no word about it."""
    said = "configured logging driver does not support reading"
    response = requests.Response()
    response.status_code = 501

    def read() -> Iterator[str]:
        with translate_errors("read logs of container 'c'", "unix:///x"):
            raise docker.errors.APIError("not implemented", response=response, explanation=said)
        yield ""

    scheduler = DockerScheduler("docker", "test")
    assert list(scheduler._follow_or_explain("job-x", read())) == []
    assert list(scheduler._follow_or_explain("job-x", read())) == []
    scheduler.close()
    assert "the output of job-x" in capfd.readouterr().err


def test_the_state_of_a_job_says_that_no_engine_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "restarts-w").write_text("2")
    engine = SimpleNamespace(is_available=lambda: False, host="unix:///x")
    scheduler = DockerScheduler("docker", "test")
    monkeypatch.setattr(scheduler, "_open_engine", lambda folder: engine)
    words = scheduler.read_reports(SimpleNamespace(state_dir=tmp_path), SimpleNamespace(details={"request": {}}))
    scheduler.close()
    assert (words.restarts, words.jobs) == (2, {})
    assert words.trouble == (Reason(code=Code.NO_ENGINE, host="unix:///x"),)


def test_the_engine_of_another_docker_host_is_opened_once_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(Engine, "close", lambda engine: closed.append(engine.host))
    spec = SimpleNamespace(description={ENGINE_KEY: {"DOCKER_HOST": "tcp://other"}})
    scheduler = DockerScheduler("docker", "test")
    first, second = (scheduler._open_engine(SimpleNamespace(read_spec=lambda: spec)) for _ in range(2))
    scheduler.close()
    assert first is second
    assert "tcp://other" in closed
