"""Log lines, app ids and refusals: every line once, in order, over any breaks. No sockets, no clocks."""

import os
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.schedulers.adapter.log_position import Position
from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.kubernetes.api.connection import Access
from muster.schedulers.kubernetes.api.errors import Refusal, explain
from muster.schedulers.kubernetes.running_apps import kept_logs, logs
from muster.schedulers.kubernetes.running_apps.app import App, AppRef, parse_app_id
from muster.schedulers.kubernetes.running_apps.kept_logs import LOG_LIMIT_BYTES, stop_and_keep_logs
from muster.schedulers.kubernetes.running_apps.logs import (
    ConnectionLimits,
    PodWatch,
    format_stamp,
    split_stamp,
)
from muster.schedulers.timestamps import build_timestamp, parse_timestamp


def test_stamps_in_any_zone_and_precision():
    assert parse_timestamp("2026-01-01T00:00:00.5Z") == parse_timestamp("2026-01-01T02:00:00.500000000+02:00")
    assert parse_timestamp("2026-01-01T00:00:00.12Z") > parse_timestamp("2026-01-01T00:00:00.119999999Z")
    assert format_stamp(parse_timestamp("2026-01-01T00:00:07.9Z")) == "2026-01-01T00:00:07Z"
    assert build_timestamp(1767225600.123456) == parse_timestamp("2026-01-01T00:00:00.123456Z")


def test_lines_keep_their_newline_and_their_spaces():
    assert split_stamp(b"2026-01-01T00:00:00Z  a b \r\n") == (parse_timestamp("2026-01-01T00:00:00Z"), b" a b \r\n")
    assert split_stamp(b"2026-01-01T00:00:00Z \n")[1] == b"\n"
    assert split_stamp(b"failed to open log file\n") == (None, b"failed to open log file\n")


@given(
    entries=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.sampled_from([b"a\n", b"b\n"])), max_size=30),
    breaks=st.lists(st.integers(0, 30), max_size=5),
)
def test_a_log_read_in_pieces_is_read_once(entries, breaks):
    """stdout and stderr may be up to a second out of order, lines may repeat, the server begins at a whole second."""
    log = [((base + second // 3, nanos), text) for base, (second, nanos, text) in enumerate(entries)]
    position, got, start = Position(), [], None
    for stop in [*sorted(breaks), len(log)]:
        since = position.resume()
        start = since[0] if since else None
        for stamp, line in log[:stop]:
            if (start is None or stamp[0] >= start) and position.accept(stamp, line):
                got.append((stamp, line))
    assert got == log


def test_streams_are_limited_but_node_0_always_has_one():
    limits = ConnectionLimits(streams=2, reads=1)
    with limits.reserve_stream(5) as first, limits.reserve_stream(6) as second, limits.reserve_stream(0) as leader:
        assert (first, second, leader) == (True, False, True)
    with limits.reserve_stream(6) as again:
        assert again


@pytest.mark.parametrize(
    "ref",
    [
        AppRef(namespace="ns", name="app"),
        AppRef(namespace="ns", name="app", access=Access(context="arn:aws:eks:eu:1:cluster/x y")),
        AppRef(namespace="ns", name="app", access=Access(kubeconfig="/home/me/.kube/a:b")),
        AppRef(namespace="ns", name="app", access=Access(kubeconfig="/k", context="c")),
    ],
)
def test_an_app_id_survives_torchx_handles(ref):
    from torchx.specs.api import parse_app_handle

    _, _, app_id = parse_app_handle(f"kubernetes://session/{ref}")
    assert "/" not in str(ref)
    assert parse_app_id(app_id) == ref


@pytest.mark.parametrize("wrong", ["app", ":app", "ns:", "a:b:c:d:e"])
def test_a_wrong_app_id(wrong):
    with pytest.raises(SchedulerError, match="the form NAMESPACE:NAME"):
        parse_app_id(wrong)


@pytest.mark.parametrize(
    ("status", "reason", "message", "expected"),
    [
        (401, "Unauthorized", "Unauthorized", "does not accept these credentials; log in again"),
        (
            403,
            "Forbidden",
            "jobs is forbidden",
            "is not allowed to create job/a: jobs is forbidden; ask",
        ),
        (403, "Forbidden", "exceeded quota: q", "exceeds the namespace's quota"),
        (403, "Forbidden", 'violates PodSecurity "restricted"', "try -cfg security=restricted"),
        (404, "NotFound", 'namespaces "n" not found', "namespace 'n' does not exist; create it"),
        (409, "AlreadyExists", "x", "job/a already exists; choose another --name"),
        (422, "Invalid", "spec.x: bad\n too", "the cluster rejected job/a: spec.x: bad too"),
        (413, "", "too large", "job/a is too large"),
        (500, "", "boom", "responded with 500 boom"),
    ],
)
def test_refusals_say_what_to_do_in_one_line(status, reason, message, expected):
    import json

    body = json.dumps({"reason": reason, "message": message}).encode()
    error = explain(Refusal.parse(status, body), verb="create", what="job/a", origin="context 'c'")
    assert expected in str(error)
    assert "\n" not in str(error)


def build_app(resources):
    return App(resources=resources, ref=AppRef(namespace="n", name="app"))


def test_a_bug_in_the_watch_is_an_error_of_its_readers():
    """They waited for ever."""

    class Broken:
        def list_all(self, *_args, **_more):
            raise KeyError("uid")

    watch = PodWatch(build_app(Broken()), check_ended=lambda: False)
    with pytest.raises(EngineError, match=r"^cannot follow the pods of app: KeyError\('uid'\)$"), watch:
        pass


def test_a_pod_has_run_although_the_watch_lags_behind_the_end_of_the_app():
    """Its lines were left out: "has no log yet: pod ... is Pending"."""
    late, told = threading.Event(), threading.Event()

    def build_pod(phase):
        labels = {"torchx.pytorch.org/role-name": "main", "batch.kubernetes.io/job-completion-index": "0"}
        metadata = {"name": "pod", "uid": "u", "labels": labels, "resourceVersion": "2"}
        return {"metadata": metadata, "status": {"phase": phase}}

    class Lagging:
        phase = "Pending"

        def list_all(self, *_args, **_more):
            return [build_pod(self.phase)], "1"

        def watch(self, *_args, **_more):
            late.wait(60)
            yield {"type": "MODIFIED", "object": build_pod("Pending")}
            told.set()

    cluster = Lagging()
    with PodWatch(build_app(cluster), check_ended=lambda: True) as watch:
        assert watch.get("u").phase == "Pending"
        cluster.phase = "Succeeded"
        assert watch.has_app_ended()
        assert watch.get("u").phase == "Succeeded"
        late.set()
        assert told.wait(60)
        assert watch.get("u").phase == "Succeeded"


def test_readers_ask_at_most_every_two_seconds_whether_the_app_has_ended(monkeypatch):
    """They asked at every change of any pod, each."""

    checks, clock = [], SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: clock.seconds))
    watch = PodWatch(build_app(None), check_ended=lambda: bool(checks.append(clock.seconds)))
    for step in range(50):
        clock.seconds = step / 10
        assert watch.has_app_ended() is False
    assert checks == [0.0, 2.0, 4.0]


@pytest.mark.parametrize(("spare", "said"), [(1, ""), (-9, " (of each the last 16 MiB or 100,000 lines)")])
def test_the_end_of_a_long_log_is_kept(tmp_path, monkeypatch, spare, said):
    """Its beginning was: people look at the end."""
    line = b"0" * 1023 + b"\n"
    chunks = [line] * (LOG_LIMIT_BYTES // len(line)) + [b"the end\n"]
    if spare > 0:
        del chunks[0]

    class Cluster:
        @contextmanager
        def stream(self, path, *, what, verb, query, budget_s):
            assert (query["follow"], budget_s) == ("true", 0)
            yield SimpleNamespace(read_chunks=lambda: iter(chunks))

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    lines, stops = [], []
    ref = AppRef(namespace="team", name="job")
    pod = SimpleNamespace(phase="Running", index=0, role="w", name="job-w-0", uid="u0")
    stop_and_keep_logs(Cluster(), ref, lambda: [pod], lambda: stops.append(1), lines.append)
    assert stops == [1]
    folder = tmp_path / "muster/kubernetes-logs/team/job"
    assert [f"kept in {folder}{said}" in each for each in lines] == [True]
    kept = (folder / "w-0.u0.log").read_bytes()
    assert kept.startswith(line)
    assert kept.endswith(line + b"the end\n")
    assert LOG_LIMIT_BYTES - 2 * len(line) < len(kept) <= LOG_LIMIT_BYTES


def test_a_kept_log_that_is_no_file_is_an_error_and_a_hole_is_its_end(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ref = AppRef(namespace="team", name="job")
    folder = kept_logs.find_folder(ref)
    folder.mkdir(parents=True, mode=0o700)
    os.mkfifo(folder / "w-0.u0.log")
    with (folder / "w-0.u1.log").open("wb") as file:
        file.write(b"a\nb\n")
        file.truncate(20 << 30)
    kept = kept_logs.read_kept_logs(ref, "w", 0)
    with pytest.raises(OSError, match="a regular file"):
        next(kept["u0"])
    assert b"".join(kept["u1"]).rstrip(b"\0") == b"a\nb\n"


class LogServer:
    """Streams of logs by the name of the pod; an exception ends one."""

    def __init__(self, logs):
        self.logs = logs

    @contextmanager
    def stream(self, path, **_more):
        yield SimpleNamespace(read_chunks=lambda: self.read(path.split("/")[-2]))

    def read(self, name):
        for chunk in self.logs[name]:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk


def keep(tmp_path, monkeypatch, logs):
    """Returns the folder with the logs, and the line for the user."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ref, lines = AppRef(namespace="team", name="job"), []
    known = {"phase": "Running", "role": "w"}
    pods = [SimpleNamespace(**known, index=index, name=name, uid=f"u{index}") for index, name in enumerate(logs)]
    stop_and_keep_logs(LogServer(logs), ref, lambda: pods, lambda: None, lines.append)
    [line] = lines
    return tmp_path / "muster/kubernetes-logs/team/job", line


def test_all_pods_without_a_log_are_named_up_to_five(tmp_path, monkeypatch):
    """Only the first was."""
    lost = {f"p{number}": [EngineError(f"no log of p{number}")] for number in range(1, 8)}
    _, line = keep(tmp_path, monkeypatch, {"p0": [b"one\n"], **lost})
    assert "p1, p2, p3, p4, p5 and 2 more " in line
    _, line = keep(tmp_path, monkeypatch, lost)
    said = "could not be kept: no log of p1; those of p2, p3, p4, p5, p6 and 1 more are lost, too"
    assert f"with them, and {said}" in line


def test_what_broken_logs_had_is_told_as_kept(tmp_path, monkeypatch):
    """It said that nothing could be kept, and the beginning was."""
    folder, line = keep(tmp_path, monkeypatch, {"p0": [b"one\n", EngineError("the stream broke")]})
    assert f"in {folder}; the logs" in line
    assert (folder / "w-0.u0.log").read_bytes() == b"one\n"


def test_a_log_that_was_trimmed_begins_with_a_whole_line(tmp_path, monkeypatch):
    """It began in the middle of one if nothing more came after the trim."""
    monkeypatch.setattr(kept_logs, "LOG_LIMIT_BYTES", 100)
    folder, line = keep(tmp_path, monkeypatch, {"p0": [b"0123456\n" * 30]})
    assert (folder / "w-0.u0.log").read_bytes() == b"0123456\n" * 12
    assert "(of each the" in line


@pytest.mark.parametrize(("count", "is_cut"), [(9, False), (10, True)])
def test_a_log_with_as_many_lines_as_are_kept_is_told_as_cut(tmp_path, monkeypatch, count, is_cut):
    monkeypatch.setattr(kept_logs, "_LINE_LIMIT", 10)
    _, line = keep(tmp_path, monkeypatch, {"p0": [b"2020-01-01T00:00:00Z a\n" * count]})
    assert ("(of each the last " in line) is is_cut
