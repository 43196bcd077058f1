"""Spans of a job's records, and what is sent to a collector: valid for the official definitions, and true."""

import json
import threading
from typing import Any

import pytest
from doubles.samples import make_record
from google.protobuf.json_format import Parse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from muster._shared.job_view import JobStatus, Recovery
from muster.agent.features.export import exporter
from muster.agent.features.export.encoding import write_metrics, write_spans
from muster.agent.features.export.exporter import (
    BATCH_SPANS,
    KEPT_SPANS,
    Address,
    Exporter,
    parse_answer,
    read_settings,
)
from muster.agent.features.export.source import MetricsSource
from muster.agent.features.export.spans import ERROR, OK, Span, SpanEvent, SpanMaker
from muster.agent.runtime.event_log import EventRecord
from muster.agent.workers.run_names import TraceParent, derive_span_id

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
JOB = TraceParent(trace_id=TRACE, span_id="00f067aa0ba902b7")
USER = TraceParent(trace_id=TRACE, span_id="1111111111111111")


class Agent:
    """The records of one agent and the spans that it sends."""

    def __init__(self, node: int | None = 0, parent: TraceParent | None = None, *, is_elastic: bool = False) -> None:
        self.maker = SpanMaker(parent, JOB, "job-x1", node, is_elastic=is_elastic)
        self.node = node
        self.at_s = 0.0
        self.round = 0
        self.attempt = 0
        self.sent: list[Span] = []

    def write(self, what: str, after_s: float = 1.0, ranks: tuple[int, ...] = (), **detail: Any) -> list[Span]:
        self.at_s += after_s
        if what == "round_formed":
            self.round += 1
        now = {"node": self.node, "round": self.round, "attempt": self.attempt}
        found = self.maker.read(make_record(what, self.at_s, ranks=ranks, detail=detail, **now))
        self.sent += found
        return found

    def start(self, after_s: float = 1.0) -> list[Span]:
        return [*self.write("round_formed", after_s, world_size=4, nodes=2), *self.write("workers_started")]

    def begin(self) -> "Agent":
        """The agent has started, and its first workers."""
        self.write("agent_started", 0.0)
        self.start()
        return self

    def fail(self, kind: str = "failure", **detail: Any) -> list[Span]:
        found = self.write("worker_failed", ranks=(3,), reason="rank 3 failed")
        found += self.write("round_broken", kind=kind, reason="rank 3 failed", **detail)
        found += self.write("workers_stopped")
        self.attempt += kind == "failure"
        return found

    def end(self, code: int = 0) -> list[Span]:
        found = self.write("job_ended", succeeded=code == 0, drained=False, reason="")
        return [*found, *self.write("agent_ended", exit_code=code)]


def run_once(agent: Agent) -> None:
    agent.begin()
    agent.fail()
    agent.start()
    agent.end()


def test_attempts_and_a_recovery_are_sent_when_they_are_over() -> None:
    agent = Agent()
    agent.write("agent_started", 0.0)
    assert agent.start() == []
    assert agent.fail() == [], "until it is known which node has group rank 0 in the next round"
    first, recovery = sorted(agent.start(), key=lambda span: span.began_s)
    assert (first.name, first.status, first.message) == ("muster.attempt", ERROR, "rank 3 failed")
    assert first.attributes["error.type"] == "failure"
    assert (first.began_s, first.ended_s) == (1001.0, 1005.0)
    assert (recovery.name, recovery.status) == ("muster.recovery", OK)
    assert (recovery.began_s, recovery.ended_s) == (1003.0, 1007.0)
    names = [event.name for event in recovery.events]
    assert names == ["worker_failed", "round_broken", "workers_stopped", "round_formed", "workers_started"]
    assert recovery.events[0].attributes["muster.ranks"] == "3"
    last, job = agent.end()
    assert (last.attributes["cicd.pipeline.task.run.result"], last.attributes["muster.attempt"]) == ("success", 1)
    assert (job.name, job.span_id, job.status, job.ended_s - job.began_s) == ("muster.job", JOB.span_id, OK, 9.0)
    assert {span.parent_id for span in (first, recovery, last)} == {JOB.span_id}


def test_all_agents_mean_the_same_spans_and_one_sends_them() -> None:
    agents = [Agent(node) for node in (0, 1, 2)]
    for agent in agents:
        run_once(agent)
    assert [len(agent.sent) for agent in agents] == [4, 0, 0]
    assert len({span.span_id for span in agents[0].sent}) == 4
    assert derive_span_id(TRACE, "attempt", 1) in {span.span_id for span in agents[0].sent}
    assert derive_span_id(TRACE, "recovery", 2) in {span.span_id for span in agents[0].sent}


def test_the_successor_of_a_lost_node_sends_what_that_one_has_not() -> None:
    agent = Agent(1).begin()
    assert agent.fail("membership") == []
    agent.node = 0
    assert [span.name for span in agent.start()] == ["muster.attempt", "muster.recovery"]


@pytest.mark.parametrize(
    ("is_elastic", "guard_died", "names"),
    [
        (False, False, ["muster.attempt", "muster.job"]),  # cancelled: all nodes are told to end
        (True, False, []),
        (False, True, []),
    ],
)
def test_a_node_that_leaves_a_job_which_goes_on_ends_no_span(is_elastic, guard_died, names) -> None:
    agent = Agent(is_elastic=is_elastic).begin()
    agent.write("signal", name="SIGTERM", guard_died=guard_died)
    agent.write("round_broken", kind="membership", reason="node 0 left: received SIGTERM")
    agent.write("workers_stopped")
    sent = agent.write("agent_ended", exit_code=143)
    assert [span.name for span in sent] == names


def test_a_drain_and_a_hang_are_sent_while_the_round_goes_on() -> None:
    agent = Agent().begin()
    agent.write("drain_begun", kind="checkpoint", drain=1)
    agent.write("drain_committed", step=40, drain=1)
    [drain] = agent.write("drain_withdrawn", reason="all ranks have saved")
    assert (drain.name, drain.attributes) == ("muster.drain", {"muster.kind": "checkpoint", "muster.step": 40})
    agent.write("hang_named", text="rank 1 absent")
    [hang] = agent.write("hang_ended")
    assert (hang.name, hang.status, hang.message) == ("muster.hang", ERROR, "rank 1 absent")
    attempt = derive_span_id(TRACE, "attempt", 1)
    assert {drain.parent_id, hang.parent_id} == {attempt}
    assert [event.name for event in drain.events] == ["drain_begun", "drain_committed", "drain_withdrawn"]


def test_a_failure_for_good_begins_no_recovery() -> None:
    agent = Agent().begin()
    agent.fail("final", cause="host-oom")
    attempt, job = agent.end(1)
    assert (attempt.name, attempt.status, job.status) == ("muster.attempt", ERROR, ERROR)
    assert attempt.attributes["error.type"] == "host-oom", "the class of its cause"
    assert "worker_failed" in {event.name for event in attempt.events}
    assert job.attributes["cicd.pipeline.result"] == "failure"


def test_a_preempted_job_is_no_failure() -> None:
    agent = Agent().begin()
    agent.write("drain_begun", kind="stop", drain=1)
    agent.write("drain_committed", step=7, drain=1)
    agent.write("round_broken", kind="drained", reason="all ranks have stopped at step 7")
    agent.write("workers_stopped")
    spans = {span.name: span for span in agent.end(143)}
    assert spans.keys() == {"muster.attempt", "muster.drain", "muster.job"}
    assert spans["muster.job"].attributes["cicd.pipeline.result"] == "cancellation"
    assert ERROR not in {span.status for span in spans.values()}


def test_a_job_that_is_given_up_while_it_waits_shows_the_recovery_that_failed() -> None:
    agent = Agent().begin()
    agent.fail("membership")
    agent.write("rendezvous_lost", 600.0, reason="no quorum")
    spans = {span.name: span for span in agent.write("agent_ended", exit_code=69)}
    assert (spans["muster.recovery"].status, spans["muster.job"].status) == (ERROR, ERROR)


def test_the_spans_of_one_that_waits_have_a_limit() -> None:
    agent = Agent().begin()
    for _ in range(1000):
        agent.write("worker_exited", ranks=(1,))
    attempt, _ = agent.end()
    assert len(attempt.events) <= 64


# -- what is sent -----------------------------------------------------------------------------------------------------


def test_the_official_definitions_accept_the_spans() -> None:
    agent = Agent(parent=USER)
    run_once(agent)
    odd = SpanEvent(name="odd", at_s=1.5, attributes={"bytes": "\udcff", "part": 0.25, "is_odd": True})
    odd_span = Span(span_id="1" * 16, parent_id="", name="x", began_s=2.0, ended_s=1.0, events=(odd,))
    body = write_spans([*agent.sent, odd_span], TRACE, {"service.name": "trainer"})
    request = Parse(_with_base64_ids(body), ExportTraceServiceRequest())
    [resource] = request.resource_spans
    [scope] = resource.scope_spans
    assert resource.resource.attributes[0].value.string_value == "trainer"
    assert scope.scope.name == "muster"
    first = scope.spans[0]
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, JOB.span_id)
    assert first.start_time_unix_nano == 1_001_000_000_000
    assert first.status.code == ERROR
    assert {each.key: each.value.int_value for each in first.attributes}["muster.world_size"] == 4
    assert first.events[0].name == "round_formed"
    job = scope.spans[-2]
    assert (job.kind, job.parent_span_id.hex()) == (2, USER.span_id)
    assert scope.spans[-1].end_time_unix_nano >= scope.spans[-1].start_time_unix_nano


def _with_base64_ids(body: bytes) -> str:
    """OTLP has hexadecimal ids, protobuf's reader of JSON wants base64: that is the only difference."""
    import base64

    def change(value: Any) -> Any:
        if isinstance(value, list):
            return [change(each) for each in value]
        if not isinstance(value, dict):
            return value
        return {
            name: base64.b64encode(bytes.fromhex(each)).decode()
            if name in ("traceId", "spanId", "parentSpanId")
            else change(each)
            for name, each in value.items()
        }

    return json.dumps(change(json.loads(body)))


def test_the_official_definitions_accept_the_metrics() -> None:
    source = MetricsSource("job-x1", "trainer", 3, JOB.format())
    source.write(make_record("agent_started"))
    source.write(make_record("round_broken", detail={"kind": "failure"}))
    recoveries = (Recovery(round=2, attempt=1, time_s=1000.0, cost_s=7.0),)
    values = (("loss", "nan"), ("big", "-inf"), ("acc", 0.5))
    failures = (("worker", 1),)
    job = JobStatus(step=40, recovery_count=1, recoveries=recoveries, values=values, failures=failures)
    source.look(None, (), job)  # type: ignore[arg-type]
    body = write_metrics(source.build_families(), source.common, {}, began_s=900.0, now_s=1000.5)
    request = Parse(_with_base64_ids(body), ExportMetricsServiceRequest())
    metrics = {each.name: each for each in request.resource_metrics[0].scope_metrics[0].metrics}
    [step] = metrics["muster_job_step"].gauge.data_points
    assert (step.as_double, step.time_unix_nano) == (40.0, 1_000_500_000_000)
    assert step.attributes[0].value.string_value == "job-x1"
    ended = metrics["muster_job_failures"].sum
    assert (ended.aggregation_temporality, ended.is_monotonic) == (2, True)
    assert ended.data_points[0].exemplars[0].trace_id.hex() == TRACE
    histogram = metrics["muster_job_recovery_seconds"].histogram
    [point] = histogram.data_points
    assert (point.count, point.sum, sum(point.bucket_counts)) == (1, 7.0, 1)
    assert point.bucket_counts[list(point.explicit_bounds).index(10.0)] == 1
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1


# -- variables --------------------------------------------------------------------------------------------------------


def address(scheme: str, host: str, port: int, path: str) -> Address:
    return Address(scheme=scheme, host=host, port=port, path=path)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://collector:4318", address("http", "collector", 4318, "/v1/traces")),
        ("http://collector:4318/", address("http", "collector", 4318, "/v1/traces")),
        ("https://otel.example.com/base", address("https", "otel.example.com", 443, "/base/v1/traces")),
        ("http://[::1]:4318", address("http", "::1", 4318, "/v1/traces")),
        ("http://[::1]", address("http", "::1", 80, "/v1/traces")),
    ],
)
def test_where_spans_go(url: str, expected: Address) -> None:
    settings = read_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": url})
    assert settings.addresses["traces"] == expected
    assert settings.addresses["metrics"].path == expected.path.replace("traces", "metrics")


def test_the_address_of_one_signal_is_used_as_it_is() -> None:
    environ = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/in", "OTEL_METRICS_EXPORTER": "none"}
    settings = read_settings(environ)
    assert settings.addresses == {"traces": address("http", "c", 4318, "/in")}
    assert read_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1", "OTEL_SDK_DISABLED": "TRUE"}).addresses == {}


@pytest.mark.parametrize(
    ("environ", "start"),
    [
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc': muster sends its own spans and",
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}, "OTEL_EXPORTER_OTLP_ENDPOINT is 'collector:4317', which"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://u:p@c:1"}, "OTEL_EXPORTER_OTLP_ENDPOINT is '...@c:1', which"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:99999"}, "OTEL_EXPORTER_OTLP_ENDPOINT is "),
    ],
)
def test_what_cannot_be_used_is_one_line(environ: dict[str, str], start: str) -> None:
    settings = read_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", **environ})
    assert settings.addresses == {}
    [line] = settings.problems
    assert line.startswith(start)
    assert "\n" not in line


def test_the_other_variables() -> None:
    settings = read_settings(
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20b%0d%0aX: y, other=1",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "1500",
            "OTEL_METRIC_EXPORT_INTERVAL": "none",
            "OTEL_RESOURCE_ATTRIBUTES": "team=vision,service.name=a",
            "OTEL_SERVICE_NAME": "b",
        }
    )
    assert settings.headers == {"api-key": "a bX: y", "other": "1"}
    assert (settings.timeout_s, settings.metrics_every_s) == (1.5, 60.0)
    assert settings.resource == {"team": "vision", "service.name": "b"}
    assert settings.addresses.keys() == {"traces", "metrics"}


@pytest.mark.parametrize("answer", [b"", b"\x16\x03\x01", b"HTTP/1.1", b"HTTP/1.1 abc\r\n\r\n"])
def test_what_is_no_answer_of_http(answer: bytes) -> None:
    with pytest.raises(ValueError, match="none of HTTP"):
        parse_answer(answer)


@pytest.mark.parametrize(("field", "wait_s"), [("retry-after: 7", 7.0), ("Retry-After: 9999", 300.0), ("X: 7", 0.0)])
def test_how_long_a_collector_wants_to_be_left_alone(field: str, wait_s: float) -> None:
    assert parse_answer(f"HTTP/1.1 429 Too Many Requests\r\n{field}\r\n\r\n".encode()) == (429, wait_s)


# -- what waits -------------------------------------------------------------------------------------------------------


class Flood:
    """Makes as many spans of a record as its duration says."""

    def read(self, record: EventRecord) -> list[Span]:
        return [
            Span(span_id=f"{number:016x}", parent_id="", name="x", began_s=0.0)
            for number in range(int(record.duration_s or 0))
        ]


def make_exporter(
    monkeypatch: pytest.MonkeyPatch, *answers: int | Exception
) -> tuple[Exporter, MetricsSource, list[int]]:
    """An exporter without a thread, whose collector answers so; how many spans each request had."""
    source, sizes, left = MetricsSource("job-x1", "trainer", 3, ""), [], list(answers)

    def answer(_address: Address, body: bytes, _settings: Any) -> tuple[int, float]:
        sizes.append(len(json.loads(body)["resourceSpans"][0]["scopeSpans"][0]["spans"]))
        found = left.pop(0) if left else 200
        if isinstance(found, Exception):
            raise found
        return found, 0.0

    monkeypatch.setattr(exporter, "post", answer)
    made = Exporter(
        read_settings({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:1/"}),
        source,
        Flood(),  # type: ignore[arg-type]
        trace_id=TRACE,
        resource={},
        on_loop=lambda call: call(),
        print_line=lambda _line: None,
    )
    made._thread._thread = threading.current_thread()
    return made, source, sizes


def flood(made: Exporter, number: int) -> None:
    made.write(make_record("x", duration_s=float(number)))


def test_spans_that_have_no_room_are_lost_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    made, source, sizes = make_exporter(monkeypatch)
    for _ in range(3):
        flood(made, 500)
    assert source.view.counts.lost["spans"] == 1500 - KEPT_SPANS
    assert made._send_spans() is None
    assert (sum(sizes), source.view.counts.exported["spans"]) == (KEPT_SPANS, KEPT_SPANS)
    assert max(sizes) <= BATCH_SPANS


@pytest.mark.parametrize("answer", [429, 503, OSError("no route to host"), ValueError("no HTTP")])
def test_spans_wait_for_a_collector_that_is_busy_or_away(monkeypatch, answer) -> None:
    made, source, sizes = make_exporter(monkeypatch, answer)
    flood(made, 3)
    assert made._send_spans() == 0.0
    flood(made, 2)
    assert made._send_spans() is None
    assert sizes == [3, 5]
    assert dict(source.view.counts.exported) == {"spans": 5}
    assert not source.view.counts.lost.get("spans")


def test_what_a_collector_refuses_for_good_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    made, source, sizes = make_exporter(monkeypatch, 400)
    flood(made, 3)
    assert made._send_spans() is None
    assert (sizes, dict(source.view.counts.lost)) == ([3], {"spans": 3})


def test_a_batch_that_comes_back_to_a_full_buffer_gives_way_to_newer_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    made, source, _ = make_exporter(monkeypatch)

    def answer(*_: object) -> tuple[int, float]:
        flood(made, KEPT_SPANS)  # while the request is on its way
        return 429, 3.0

    monkeypatch.setattr(exporter, "post", answer)
    flood(made, 10)
    assert made._send_spans() == 3.0
    assert len(made._spans) == KEPT_SPANS
    assert source.view.counts.lost["spans"] == 10


@pytest.mark.parametrize(
    ("is_silent", "asked_ago_s", "waits"),
    [(False, None, True), (False, 0.1, True), (False, 9.0, False), (True, None, False)],
)
def test_the_end_waits_for_no_collector_that_is_silent_or_slow(monkeypatch, is_silent, asked_ago_s, waits) -> None:
    made, _, _ = make_exporter(monkeypatch)
    waited: list[float] = []
    thread = {"join": lambda _, limit_s: waited.append(limit_s), "is_alive": lambda _: True}
    made._thread._thread = type("Thread", (), thread)()
    made._is_silent = is_silent
    monkeypatch.setattr(exporter.time, "monotonic", lambda: 100.0)
    made._asked_s = None if asked_ago_s is None else 100.0 - asked_ago_s
    made.close()
    assert bool(waited) is waits
