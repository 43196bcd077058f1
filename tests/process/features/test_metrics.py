"""Metrics, traces and one run in a tracker, of real agents: a port, a collector, and wandb without a network."""

import http.client
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from doubles.clocks import HandClock
from harness import AGENT, PROGRAMS, Tree, wait_until
from prometheus_client import openmetrics, parser
from prometheus_client.openmetrics import parser as open_parser  # noqa: F401  # makes `openmetrics.parser`

from muster.agent.features.export.endpoint import MetricsEndpoint
from muster.agent.features.export.source import MetricsSource
from muster.agent.runtime.loop import Loop
from muster.schedulers.failure_report import parse_status

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the status page is for Linux")

STEPPING = PROGRAMS / "agent/stepping.py"
FAILS_ONCE = """
import os, pathlib, sys, time
from muster import worker
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
pathlib.Path(f"env-{rank}-{attempt}").write_text("\\n".join(f"{k}={v}" for k, v in os.environ.items()))
for step in range(20):
    worker.step(step, total=20, loss=0.5)
    time.sleep(0.06)
    if attempt == "0" and rank == "1" and step == 12:
        sys.exit(7)
"""


def start(folder: Path, *flags: str, program: str = "main.py", **env: str) -> Tree:
    given = ["--standalone", "--rdzv-id", "job", "--start", "cold", "--log-dir", str(folder / "logs"), *flags]
    command = [*AGENT, *given, program, str(folder / "go")]
    return Tree(command, cwd=folder, env={**os.environ, **env})


def ask(address: str, path: str, *, method: str = "GET", **fields: str) -> tuple[int, str, str]:
    """Status, type and text of an answer."""
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request(method, path, headers=fields)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()
    finally:
        connection.close()


def find_address(folder: Path) -> str:
    path = folder / "logs/job/status.json"
    status = parse_status(path.read_bytes()) if path.exists() else None
    return status.nodes[0].metrics if status is not None and status.nodes else ""


def read_value(text: str, line: str) -> float | None:
    found = re.search(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
    return None if found is None else float(found[1])


def test_a_free_port_is_in_the_status_and_serves_what_both_readers_accept(tmp_path: Path) -> None:
    with start(tmp_path, "--nproc-per-node", "2", "--metrics-port", "0", program=str(STEPPING)) as tree:
        wait_until(lambda: find_address(tmp_path), what="a status with the port")
        address = find_address(tmp_path)
        assert address.startswith("127.0.0.1:")
        line = 'muster_job_state{run_id="job",state="running"}'
        wait_until(lambda: read_value(ask(address, "/metrics")[2], line) == 1.0, what="a job that runs")
        memory = 'muster_rank_memory_bytes{run_id="job",rank="1"}'
        wait_until(lambda: read_value(ask(address, "/metrics")[2], memory), what="the memory of a worker")
        _, kind, text = ask(address, "/metrics")
        assert kind == "text/plain; version=0.0.4; charset=utf-8"
        names = {family.name for family in parser.text_string_to_metric_families(text)}
        assert {"muster_job_step", "muster_rank_memory_bytes", "torchelastic_workers_remaining_restarts"} <= names
        accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.4"
        _, kind, text = ask(address, "/metrics", Accept=accept)
        assert kind.startswith("application/openmetrics-text")
        assert {family.name for family in openmetrics.parser.text_string_to_metric_families(text)} >= names - {
            "muster_agent_events"
        }
        assert ask(address, "/healthz")[::2] == (200, "ok\n")
        assert ask(address, "/readyz")[::2] == (200, "running\n")
        status = parse_status(ask(address, "/status")[2].encode())
        assert status is not None
        assert (status.run_id, status.world_size) == ("job", 2)
        assert ask(address, "/")[0] == 404
        assert ask(address, "/status", method="POST")[0] == 405
        assert ask(address, "/status", x="a" * 9000)[0] == 431
        tree.send(signal.SIGTERM)
        tree.wait()


@pytest.mark.parametrize(
    "address",
    ["{port}", *(pytest.param(each, marks=pytest.mark.long) for each in ("127.0.0.1:{port}", "192.0.2.1:9464"))],
)
def test_a_port_that_is_taken_is_one_line_and_the_job_runs(tmp_path: Path, address: str) -> None:
    (tmp_path / "main.py").write_text("print('done')")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = address.format(port=taken.getsockname()[1])
        with start(tmp_path, "--metrics-port", given) as tree:
            outcome = tree.wait().check()
    [line] = [line for line in outcome.stderr.splitlines() if "metrics-port" in line]
    reason = "Cannot assign requested address" if given.startswith("192") else "Address already in use"
    assert reason in line
    assert line.endswith("runs without metrics")


# -- a collector ------------------------------------------------------------------------------------------------------


def test_a_collector_gets_each_attempt_the_recovery_and_the_job(tmp_path: Path, collector: Any) -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    env = {"TRACEPARENT": parent, "OTEL_EXPORTER_OTLP_HEADERS": "api-key=secret", "OTEL_METRIC_EXPORT_INTERVAL": "1000"}
    (tmp_path / "main.py").write_text(FAILS_ONCE)
    env |= {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}"}
    env["http_proxy"] = "http://127.0.0.1:1"
    with start(tmp_path, "--nproc-per-node", "2", "--max-restarts", "1", **env) as tree:
        tree.wait().check()
    traces = [body for path, body, _ in collector.got if path == "/v1/traces"]
    spans = [span for body in traces for span in body["resourceSpans"][0]["scopeSpans"][0]["spans"]]
    assert [span["name"] for span in spans].count("muster.attempt") == 2
    by_name = {span["name"]: span for span in spans}
    assert by_name.keys() == {"muster.attempt", "muster.recovery", "muster.job"}
    assert {span["traceId"] for span in spans} == {parent.split("-")[1]}
    assert by_name["muster.job"]["parentSpanId"] == parent.split("-")[2]
    assert {headers["api-key"] for *_, headers in collector.got} == {"secret"}
    attempts = [span["spanId"] for span in spans if span["name"] == "muster.attempt"]
    for attempt, span_id in enumerate(attempts):
        assert (
            f"TRACEPARENT=00-{parent.split('-')[1]}-{span_id}-01"
            in (tmp_path / f"env-1-{attempt}").read_text().splitlines()
        )
    metrics = [body for path, body, _ in collector.got if path == "/v1/metrics"][-1]
    names = {each["name"] for each in metrics["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]}
    assert {"muster_job_step", "muster_rank_step", "muster_job_failures"} <= names


# -- trackers ---------------------------------------------------------------------------------------------------------

LOGS_TO_WANDB = """
import os, sys, time
import wandb
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
if rank == "0":
    run = wandb.init(project="p", settings=wandb.Settings(x_disable_stats=True, silent=True))
    for step in range(3):
        run.log({"loss": 1.0 / (1 + step)})
    print("RUN", attempt, run.id, flush=True)
if attempt == "0":
    if rank == "0":
        sys.exit(3)  # without finish
    time.sleep(60)
if rank == "0":
    run.finish()
"""


@pytest.mark.long
def test_wandb_continues_one_run_after_a_crash_and_a_restart(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(LOGS_TO_WANDB)
    flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--tracker-run", "--tee", "3", "--rdzv-id", "exp-7"]
    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_ERROR_REPORTING": "false"}
    with start(tmp_path, *flags, **env) as tree:
        outcome = tree.wait().check()
    assert re.findall(r"RUN (\d) (\S+)", outcome.stdout) == [("0", "exp-7"), ("1", "exp-7")]
    runs = {path.name.rpartition("-run-")[2].partition("-")[2] for path in (tmp_path / "wandb").glob("offline-run-*")}
    assert runs == {"exp-7"}


# -- the port alone ---------------------------------------------------------------------------------------------------


def test_a_scrape_needs_nothing_of_the_agents_loop_and_health_says_when_that_stands_still() -> None:
    clock = HandClock()
    loop = Loop(clock)
    source = MetricsSource("job", "trainer", 0, "")
    endpoint = MetricsEndpoint(("127.0.0.1", 0), source, loop)
    try:
        for _ in range(20):
            assert ask(endpoint.address, "/metrics")[0] == 200
        assert ask(endpoint.address, "/healthz")[0] == 200
        assert ask(endpoint.address, "/status", Host="rebound.example")[0] == 421
        assert ask(endpoint.address, "/readyz")[::2] == (503, "starting\n")
        clock.at_s += 60.0
        assert ask(endpoint.address, "/healthz")[0] == 503
        assert ask(endpoint.address, "/metrics")[0] == 200
        loop.turn(0.0)
        assert ask(endpoint.address, "/healthz")[0] == 200
    finally:
        endpoint.close()
        endpoint.close()
        loop.close()
    with pytest.raises(ConnectionRefusedError):
        ask(endpoint.address, "/metrics")


@pytest.mark.parametrize("host", ["::", "0.0.0.0", "::1"])
def test_an_address_of_all_is_reached_by_both_versions_of_ip(host: str) -> None:
    if not socket.has_dualstack_ipv6() and host == "::1":
        pytest.skip("there is no IPv6 here")
    loop = Loop()
    endpoint = MetricsEndpoint((host, 0), MetricsSource("job", "trainer", 0, ""), loop)
    port = endpoint.address.rpartition(":")[2]
    try:
        for each in ("127.0.0.1", "[::1]"):
            if host in ("::", "0.0.0.0" if each == "127.0.0.1" else "::1") and socket.has_dualstack_ipv6():
                assert ask(f"{each}:{port}", "/metrics")[0] == 200
    finally:
        endpoint.close()
        loop.close()
