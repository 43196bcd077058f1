"""What `/metrics` says: valid for independent readers, and true."""

import importlib.util
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles.samples import make_record
from doubles.telemetry_nodes import FakeLeader, FakeLoop, Node
from prometheus_client import openmetrics, parser
from prometheus_client.openmetrics import parser as open_parser  # noqa: F401  # makes `openmetrics.parser`

from muster._shared.job_view import DeviceStatus, Goodput, JobState, JobStatus, RankStatus, Recovery
from muster._shared.layouts import StatusPageLayout as Layout
from muster._shared.records import replace
from muster.agent.features.export import endpoint
from muster.agent.features.export.endpoint import write_text
from muster.agent.features.export.families import ENDS, STATES
from muster.agent.features.export.source import MetricsSource
from muster.agent.runtime.event_log import EventRecord

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def read_text(source: MetricsSource) -> dict[str, Any]:
    """By Prometheus' own reader of its text."""
    text = write_text(source.build_families(), source.common, is_open=False)
    return {family.name: family for family in parser.text_string_to_metric_families(text)}


def read_open(source: MetricsSource) -> dict[str, Any]:
    """By the reader of OpenMetrics, which is strict."""
    text = write_text(source.build_families(), source.common, is_open=True)
    return {family.name: family for family in openmetrics.parser.text_string_to_metric_families(text)}


def values(families: dict[str, Any], name: str) -> dict[tuple[str, ...], float]:
    """By their own labels."""
    return {
        tuple(value for key, value in sample.labels.items() if key != "run_id"): sample.value
        for sample in families[name].samples
        if sample.name in (name, f"{name}_total")
    }


def make_source(parent: str = "", **changes: Any) -> MetricsSource:
    return MetricsSource("job-x1", changes.get("role", "trainer"), 3, parent)


def record(what: str, *, at_s: float = 0.0, number: int = 1, attempt: int = 0, **detail: Any) -> EventRecord:
    return make_record(what, at_s, round=number, attempt=attempt, detail=detail)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[Node, MetricsSource]]:
    made, source = Node(tmp_path), make_source()
    made.on_look = source.look
    yield made, source
    made.page.close()


def test_both_readers_accept_what_a_node_says_and_find_the_same(node: tuple[Node, MetricsSource]) -> None:
    made, source = node
    for each in ("agent_started", "round_formed", "workers_started"):
        source.write(record(each))
    for step in range(1, 6):
        made.step(8 * step + 2, 8 * step)
        made.look()
    text, opened = read_text(source), read_open(source)
    assert values(text, "muster_job_step") == values(opened, "muster_job_step") == {(): 40.0}
    assert values(text, "muster_rank_step") == {("0",): 42.0, ("1",): 40.0}
    assert values(text, "muster_job_steps_planned") == {(): 1000.0}
    assert values(opened, "muster_job_state")["running",] == 1.0
    assert sum(values(opened, "muster_job_state").values()) == 1.0
    assert values(text, "muster_job_nodes") == {("running",): 1.0, ("spare",): 0.0, ("lost",): 0.0}
    assert values(text, "torchelastic_workers_remaining_restarts") == {("trainer",): 3.0}
    assert values(opened, "muster_agent_events")["round_formed",] == 1.0
    assert {sample.labels["run_id"] for family in opened.values() for sample in family.samples} == {"job-x1"}


def test_a_node_that_does_not_lead_tells_of_itself_only(tmp_path: Path) -> None:
    loop, leader, nodes, sources = FakeLoop(), FakeLeader(2), [], []
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        nodes.append(Node(tmp_path / str(rank), loop=loop, leader=leader, rank=rank))
        sources.append(make_source())
        nodes[-1].on_look = sources[-1].look
    for step in range(3):
        for each in nodes:
            each.step(step, step)
        loop.run(1.0)
    leads, follows = (read_text(source) for source in sources)
    assert [values(each, "muster_node_leads") for each in (leads, follows)] == [{(): 1.0}, {(): 0.0}]
    assert values(leads, "muster_rank_step").keys() == {("0",), ("1",)}
    assert values(follows, "muster_rank_step").keys() == {("2",), ("3",)}
    assert "muster_job_step" in leads
    of_job = ("muster_job_", "torchelastic_workers_remaining", "torchelastic_workers_flakiness")
    assert not [name for name in follows if name.startswith(of_job)]
    status = sources[1].build_status()
    assert (status.run_id, [each.global_rank for each in status.ranks]) == ("job-x1", [2, 3])
    for each in nodes:
        each.page.close()


def test_where_a_node_can_be_read_is_in_its_status(tmp_path: Path) -> None:
    made = Node(tmp_path)
    made.plane._sampler.facts = {"metrics": "127.0.0.1:9464"}
    made.step(1, 1)
    made.look()
    status = made.read()
    assert [each.metrics for each in status.nodes] == ["127.0.0.1:9464"]
    made.page.close()


def fail(source: MetricsSource, number: int, cost_s: float | None, **detail: Any) -> None:
    source.write(record("round_broken", number=number, at_s=number, **detail))
    recoveries = (Recovery(round=number + 1, attempt=1, time_s=1000.0 + number, cost_s=cost_s),)
    causes = (("hang", 1),) if detail.get("hang") else (("worker", 1), ("node", number - 1))
    source.look(*look(recovery_count=number, recoveries=recoveries, failures=causes))


def look(**changes: Any) -> tuple[Any, tuple[RankStatus, ...], JobStatus]:
    return None, (), JobStatus(run_id="job-x1", **changes)


def test_each_recovery_is_counted_once_when_it_is_over() -> None:
    source = make_source()
    fail(source, 1, None, kind="failure")
    assert read_open(source)["muster_job_recovery_seconds"].samples[0].value == 0
    for cost_s in (3.0, 3.0):
        source.look(*look(recovery_count=1, recoveries=(Recovery(round=2, attempt=1, cost_s=cost_s),)))
    fail(source, 2, 45.0, kind="membership")
    families = read_open(source)
    found = {
        (sample.name.rpartition("_")[2], sample.labels.get("le")): sample.value
        for sample in families["muster_job_recovery_seconds"].samples
    }
    assert found["bucket", "2.0"] == 0
    assert found["bucket", "5.0"] == 1
    assert found["bucket", "30.0"] == 1
    assert found["bucket", "60.0"] == found["bucket", "+Inf"] == found["count", None] == 2
    assert found["sum", None] == 48.0
    counts = {("worker",): 1.0, ("node",): 1.0, ("hang",): 0.0, ("fenced",): 0.0}
    assert values(families, "muster_job_failures") == counts, "those that have not happened are 0, not absent"


@pytest.mark.parametrize(("parent", "label"), [(PARENT, "trace_id"), ("", "round")])
def test_a_recovery_has_an_example_that_names_its_trace_or_its_round(parent: str, label: str) -> None:
    source = make_source(parent)
    fail(source, 4, 3.0, kind="failure", hang=True)
    families = read_open(source)
    exemplars = [each.exemplar for each in families["muster_job_recovery_seconds"].samples if each.exemplar]
    assert [(each.value, label in each.labels) for each in exemplars] == [(3.0, True)]
    ended = families["muster_job_failures"].samples
    told = [(each.labels["cause"], label in each.exemplar.labels) for each in ended if each.exemplar]
    assert told == [("hang", True)]
    text = write_text(source.build_families(), source.common, is_open=False)
    assert " # {" not in text, "Prometheus' text has no exemplars"


def test_labels_are_escaped_and_values_of_any_kind_written() -> None:
    source = MetricsSource('a"b\\c\nd', "r", 0, "")
    source.look(*look(values=(("loss", "nan"), ("big", "inf"), ('x"y', 0.5), ("word", "abc")), exit_code=None))
    for families in (read_text(source), read_open(source)):
        found = values(families, "muster_job_value")
        assert math.isnan(found.pop(("loss",)))
        assert found == {("big",): math.inf, ('x"y',): 0.5}
        assert families["muster_job_value"].samples[0].labels["run_id"] == 'a"b\\c\nd'


def test_goodput_and_what_was_lost() -> None:
    source = make_source()
    lost = (("start", 12.5), ("repeated", 2.0))
    source.look(*look(goodput=Goodput(fraction=0.9, productive_s=130.5, lost_s=lost), state=JobState.RUNNING))
    families = read_open(source)
    assert values(families, "muster_job_goodput_ratio") == {(): 0.9}
    assert values(families, "muster_job_productive_seconds") == {(): 130.5}
    assert values(families, "muster_job_lost_seconds") == {("start",): 12.5, ("repeated",): 2.0}


def test_what_is_not_known_is_left_out() -> None:
    families = read_open(make_source())
    assert values(families, "muster_node_leads") == {(): 0.0}
    assert not [name for name in families if name.startswith("muster_job")]


def test_a_flood_of_names_is_not_counted_without_end() -> None:
    source = make_source()
    for number in range(1000):
        source.write(record(f"what-{number}"))
    assert len(values(read_open(source), "muster_agent_events")) == 64


def test_ranks_of_a_job_that_lists_none_are_there(node: tuple[Node, MetricsSource]) -> None:
    made, source = node
    made.round = made.round.__class__(**{**made.round.__dict__, "world_size": 1000})
    made.set_word(0, Layout.STEP, 5)
    made.look()
    assert values(read_text(source), "muster_rank_step").keys() == {("0",)}


def test_what_each_device_does() -> None:
    source = make_source()
    device = DeviceStatus(temperature_c=71, clock_hz=1_980_000_000, slowed_by="power cap, hardware thermal", xids=2)
    ranks = (RankStatus(global_rank=4, node=0, local_rank=0, device=device),)
    source.look(None, ranks, JobStatus(run_id="job-x1"))
    families = read_open(source)
    assert values(families, "muster_rank_gpu_temperature_celsius") == {("4",): 71.0}
    assert values(families, "muster_rank_gpu_clock_hertz") == {("4",): 1.98e9}
    assert values(families, "muster_rank_gpu_xid_errors") == {("4",): 2.0}
    assert values(families, "muster_rank_gpu_slowed") == {("4", "power cap"): 1.0, ("4", "hardware thermal"): 1.0}
    assert "muster_rank_gpu_power_watts" not in families


def test_the_page_has_every_metric_and_no_other() -> None:
    root = Path(__file__).parents[3]
    code = (root / "muster/agent/features/export/families.py").read_text()
    page = (root / "docs/metrics.md").read_text()
    names = set(re.findall(r'"((?:muster_(?:job|node|rank|agent)|torchelastic)_\w+)"', code))
    names |= {f"torchelastic_workers_{each}" for each in (*STATES, *ENDS)}
    told = set(re.findall(r"`((?:muster_(?:job|node|rank|agent)|torchelastic)_\w+?)(?:_total)?`", page))
    assert told == names


def test_failures_are_counted_by_the_class_of_their_cause() -> None:
    source = make_source()
    for cause in ("host-oom", "host-oom", "", "crash"):
        source.write(record("round_broken", kind="failure", cause=cause))
    source.look(*look(snapshot_step=40))
    families = read_open(source)
    counts = values(families, "muster_job_causes")
    assert (counts["host-oom",], counts["crash",], counts["data",], sum(counts.values())) == (2.0, 1.0, 0.0, 3.0)
    assert values(families, "muster_job_snapshot_step") == {(): 40.0}


# -- torch's names -----------------------------------------------------------------------------------------------------

NOT_TOLD = {
    "SimpleElasticAgent._assign_worker_ranks": "ranks come with the round",
    "SimpleElasticAgent.run": "the agent has ended then",
    "LocalElasticAgent._monitor_workers": "nothing polls",
}


def list_torch_names() -> tuple[set[str], set[str]]:
    """What torch's own agent publishes: of the workers, and methods that it measures."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        pytest.skip("torch is not installed")
    folder = Path(found.origin).parent / "distributed/elastic/agent/server"
    text = "".join((folder / name).read_text() for name in ("api.py", "local_elastic_agent.py"))
    workers = set(re.findall(r'put_metric\(f"workers\.\{[a-z.]+\}\.([a-z_]+)"', text))
    workers |= set(re.findall(r'_record_metric_with_condition\(\s*"([a-z_]+)"', text))
    methods = {
        f"{kind}.{method}"
        for kind, body in re.findall(r"^class (\w+)\b(.*?)(?=^class |\Z)", text, re.MULTILINE | re.DOTALL)
        for method in re.findall(r"@prof\s+(?:#[^\n]*\s+)*def (\w+)", body)
    }
    return workers, methods


def write_round(source: MetricsSource, at_s: float, attempt: int = 0) -> None:
    source.write(record("round_formed", at_s=at_s, attempt=attempt))
    started = record("workers_started", at_s=at_s + 0.5, attempt=attempt)
    source.write(replace(started, duration_s=0.5))


def test_all_of_torchs_names_are_told_but_for_those_that_have_no_meaning_here() -> None:
    source = make_source()
    source.write(record("agent_started"))
    write_round(source, 2.0)
    source.write(record("round_broken", at_s=10.0, kind="failure"))
    source.write(replace(record("workers_stopped", at_s=11.0), duration_s=1.0))
    write_round(source, 11.25, attempt=1)
    source.look(*look(restarts_left=2))
    running = read_text(source)
    assert values(running, "torchelastic_workers_healthy") == {("trainer",): 1.0}
    assert values(running, "torchelastic_workers_run") == {("trainer",): 0.0}
    assert values(running, "torchelastic_duration_ms") == {
        ("SimpleElasticAgent._rendezvous",): 250.0,
        ("LocalElasticAgent._start_workers",): 500.0,
        ("SimpleElasticAgent._initialize_workers",): 750.0,
        ("LocalElasticAgent._stop_workers",): 1000.0,
        ("SimpleElasticAgent._restart_workers",): 1750.0,
    }
    assert values(running, "torchelastic_success")["SimpleElasticAgent._rendezvous",] == 2.0

    source.write(record("job_ended", at_s=20.0, attempt=1, succeeded=True, drained=False))
    ended = read_open(source)
    assert values(ended, "torchelastic_workers_run") == {("trainer",): 1.0}
    assert values(ended, "torchelastic_workers_succeeded") == {("trainer",): 1.0}
    names = ("run_success_with_retries", "run_success_no_retries", "run_failed_with_retries", "run_failed_no_retries")
    found = [values(ended, f"torchelastic_workers_{name}")["trainer",] for name in names]
    assert found == [1.0, 0.0, 0.0, 0.0]

    workers, methods = list_torch_names()
    told = {name.removeprefix("torchelastic_workers_").removesuffix("_total") for name in ended}
    assert {name.removesuffix("_total") for name in workers} <= told
    assert len(workers) == 7
    assert {name for (name,) in values(ended, "torchelastic_duration_ms")} == methods - NOT_TOLD.keys()
    assert methods >= NOT_TOLD.keys()


def test_a_job_that_failed_is_as_flaky_as_can_be_and_a_drained_one_counts_no_run() -> None:
    for kind, flakiness, total in (("failed", 100.0, 1.0), ("drained", 0.0, 0.0)):
        source = make_source()
        source.look(*look(restarts_left=3))
        source.write(record("job_ended", succeeded=False, drained=kind == "drained"))
        found = read_text(source)
        assert values(found, "torchelastic_workers_flakiness") == {("trainer",): flakiness}
        assert values(found, "torchelastic_workers_run") == {("trainer",): total}


@pytest.mark.parametrize(
    ("field", "is_own"),
    [
        *((host, True) for host in ("", "10.1.2.3", "10.1.2.3:80", "[fe80::1]", "[::1]:80", "LocalHost:80")),
        *((host, True) for host in ("a.localhost", "node1", "node1:80")),
        ("gpu7.own.example:9464", True),
        ("gpu7.of-the-resolver.example:9464", True),
        ("train-w-0.train.ml.svc.corp.:80", True),
        ("notcorp.svc.corp", True),
        ("evil.example", False),
        ("gpu7.evil.example:9464", False),
        ("evilcorp.example", False),
        ("10.1.2.3.evil.example", False),
        ("a.localhost.evil.example:80", False),
    ],
)
def test_a_name_that_others_can_bind_to_this_address_is_not_answered(field, is_own, tmp_path, monkeypatch) -> None:
    (tmp_path / "resolv").write_text("# search evil.example\nnameserver 10.0.0.1\n\nsearch ml.svc.corp Svc.Corp. .\n")
    monkeypatch.setattr(endpoint, "_RESOLVER", str(tmp_path / "resolv"))
    monkeypatch.setattr(endpoint.socket, "gethostname", lambda: "gpu7.own.example")
    monkeypatch.setattr(endpoint.socket, "getfqdn", lambda: "gpu7.of-the-resolver.example")
    assert endpoint.is_own_name(field) == is_own
    monkeypatch.setattr(endpoint, "_RESOLVER", str(tmp_path / "none"))
    assert endpoint.is_own_name(field) == (is_own and "corp" not in field)
