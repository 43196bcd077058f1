"""The queries of the dashboard in examples/grafana: valid, and of metrics and labels that `/metrics` has."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from doubles.samples import make_record
from prometheus_client import parser

from muster._shared.job_view import Goodput, JobState, JobStatus, NodeStatus, RankStatus, Recovery, SlowRank
from muster.agent.features.export.endpoint import write_text
from muster.agent.features.export.source import MetricsSource

ROOT = Path(__file__).parents[3]
BOARD = json.loads((ROOT / "examples/grafana/muster.json").read_text())


def list_queries() -> list[tuple[str, str]]:
    """Where, and what."""
    found = [(panel["title"], target["expr"]) for panel in BOARD["panels"] for target in panel["targets"]]
    found += [(each["name"], each["expr"]) for each in BOARD["annotations"]["list"]]
    return found


def read_metrics() -> dict[str, set[str]]:
    """All names that a query may have, with their labels: of a job of which everything is known."""
    source = MetricsSource("job-x1", "trainer", 3, "")
    source.write(make_record("round_broken", detail={"kind": "failure"}))
    rank = RankStatus(
        global_rank=0,
        node=0,
        local_rank=0,
        step=1,
        rate=1.0,
        still_s=1.0,
        cpu=1.0,
        memory_bytes=1,
        gpu=0.5,
        gpu_memory_bytes=1,
        collective_s=1.0,
    )
    job = JobStatus(
        state=JobState.RUNNING,
        step=1,
        total=2,
        rate=1.0,
        eta_s=1.0,
        values=(("loss", 0.5),),
        started_s=1.0,
        restarts_left=1,
        time_to_start_s=1.0,
        goodput=Goodput(lost_s=(("start", 1.0),)),
        failures=(("worker", 1),),
        recoveries=(Recovery(round=2, attempt=1, cost_s=1.0),),
        recovery_count=1,
        slow_ranks=(SlowRank(global_rank=0, node=0, is_chronic=True, late_s=1.0),),
        peak_memory_bytes=1,
    )
    source.look(NodeStatus(node_index=0, cpu=1.0, memory_bytes=1), (rank,), job)
    source.count_exported("spans", taken=1, lost=1)
    text = write_text(source.build_families(), source.common, is_open=False)
    names: dict[str, set[str]] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
    return names


METRICS = read_metrics()


def prepare(query: str) -> str:
    """As Grafana sends it."""
    return query.replace("$__rate_interval", "1m").replace("$run_id", "job-x1")


def walk(node: Any) -> Iterator[Any]:
    yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "args", "param"):
        below = getattr(node, name, None)
        for each in below if isinstance(below, list | tuple) else [below]:
            if each is not None:
                yield from walk(each)


@pytest.mark.parametrize(("where", "query"), list_queries())
def test_a_query_is_of_what_the_agent_says(where: str, query: str) -> None:
    nodes = list(walk(promql_parser.parse(prepare(query))))
    selectors = [node for node in nodes if isinstance(node, promql_parser.VectorSelector)]
    assert selectors, where
    for selector in selectors:
        assert selector.name in METRICS, f"{where}: there is no {selector.name}"
        labels = {matcher.name for matcher in selector.matchers.matchers}
        assert labels - {"__name__"} <= METRICS[selector.name], where
    known = set().union(*(METRICS[selector.name] for selector in selectors))
    for node in nodes:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            assert set(node.modifier.labels) <= known, where


def test_the_legends_name_labels_that_the_query_keeps() -> None:
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            kept = re.search(r"by \(([\w, ]+)\)", target["expr"])
            name = re.search(r"muster_\w+", target["expr"])
            assert wanted <= (set(kept[1].split(", ")) if kept else METRICS[name[0]]), panel["title"]


def test_variables_and_panels_are_complete() -> None:
    variables = {each["name"] for each in BOARD["templating"]["list"]}
    used = {name for name in re.findall(r"\$\{?(\w+)", json.dumps(BOARD)) if not name.startswith("__")}
    assert used == variables
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in BOARD["panels"])
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert max(x for x, _ in cells) < 24
