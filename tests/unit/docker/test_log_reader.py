"""Reading logs across containers and through an engine that goes away, against a scripted engine."""

from muster.schedulers.docker.engine.container_state import ContainerFacts, parse_time
from muster.schedulers.docker.engine.errors import EngineGone
from muster.schedulers.docker.live.logs import ContainerLogQuery, LogReader, split_lines
from muster.schedulers.docker.spec import Label


class ScriptedEngine:
    """Containers with dated records; `steps` happen one by one whenever the reader waits."""

    def __init__(self, *steps):
        self.containers = {}
        self.steps = list(steps)
        self.breaks = 0

    def wait(self, _seconds):
        if self.steps:
            self.steps.pop(0)(self)

    def facts(self, number):
        status, _ = self.containers[number]
        return ContainerFacts(
            id=str(number),
            name=str(number),
            labels={Label.INCARNATION: str(number)},
            status=status,
            exit_code=1 if status == "exited" else None,
            oom_killed=False,
            error="",
            started_at="",
            finished_at="",
        )

    def list_containers(self, _labels):
        return [self.facts(number) for number in sorted(self.containers, reverse=True)]

    def inspect_container(self, container):
        return self.facts(int(container))

    def logs(self, container, *, timestamps, since_s, **_):
        for time, text in self.containers[int(container)][1]:
            if since_s is None or parse_time(time) >= since_s:
                yield f"{time} {text}".encode() if timestamps else text.encode()
        if self.breaks:
            self.breaks -= 1
            raise EngineGone("gone")


def record(second, text):
    return f"2026-01-01T00:00:{second:02d}.000000000Z", text


def read(engine, over):
    query = ContainerLogQuery(labels={})
    return list(LogReader(engine, query, wait=engine.wait, is_over=over).lines())


def test_containers_are_read_in_order():
    engine = ScriptedEngine()
    engine.containers = {1: ("exited", [record(2, "b\n")]), 0: ("exited", [record(1, "a\n")])}
    assert read(engine, None) == ["a\n", "b\n"]


def test_followed_log_goes_on_in_the_next_container():
    def replace(engine):
        engine.containers[1] = ("exited", [record(2, "b\n")])

    engine = ScriptedEngine(lambda _: None, replace)
    engine.containers = {0: ("exited", [record(1, "a\n")])}
    assert read(engine, lambda: not engine.steps) == ["a\n", "b\n"]


def test_nothing_is_lost_or_repeated_when_the_engine_goes_away():
    records = [record(1, "a\n"), record(1, "b\n"), record(2, "c\n")]

    def grow(engine):
        engine.containers[0] = ("running", [*records, record(2, "d\n"), record(3, "e\n")])

    def end(engine):
        engine.containers[0] = ("exited", engine.containers[0][1])

    engine = ScriptedEngine(grow, end, lambda _: None)
    engine.containers = {0: ("running", records)}
    engine.breaks = 1
    assert read(engine, lambda: not engine.steps) == ["a\n", "b\n", "c\n", "d\n", "e\n"]


def test_one_that_never_ran_ends_with_the_app():
    engine = ScriptedEngine(lambda _: None)
    engine.containers = {0: ("created", [])}
    assert read(engine, lambda: not engine.steps) == []


def test_lines_are_joined_and_cut():
    frames = [b"a", b"b\nc\xc3", b"\xa4\n\n", b"\xff", b"end"]
    assert list(split_lines(iter(frames))) == ["ab\n", "c\u00e4\n", "\n", "\ufffdend"]
