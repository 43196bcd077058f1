"""Log lines, app ids and refusals: every line once, in order, over any breaks. No sockets, no clocks."""

import json
import os
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.kubernetes.api.connection import Access
from muster.schedulers.kubernetes.api.errors import Refusal, explain
from muster.schedulers.kubernetes.running_apps import logs
from muster.schedulers.kubernetes.running_apps.app import App, AppRef, parse_app_id
from muster.schedulers.kubernetes.running_apps.logs import format_stamp, split_stamp, stop_and_keep_logs
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
    body = json.dumps({"reason": reason, "message": message}).encode()
    error = explain(Refusal.parse(status, body), verb="create", what="job/a", origin="context 'c'")
    assert expected in str(error)
    assert "\n" not in str(error)


REF = AppRef(namespace="team", name="job")


class LogServer:
    """Streams of logs by the name of the pod; an exception ends one. It lists no pods."""

    def __init__(self, logs):
        self.logs, self.client, self.lists = logs, self, 0

    @contextmanager
    def stream(self, path, *, query, budget_s, **_more):
        assert (query["follow"], budget_s) == ("true", 0)
        yield self.read(path.split("/")[-2])

    def read(self, name):
        for chunk in self.logs[name]:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    def list_app(self, *_args):
        self.lists += 1
        if self.logs:
            raise EngineError("away")
        return []


@pytest.mark.parametrize("is_away", [False, True])
def test_readers_of_an_app_look_at_its_pods_together(monkeypatch, is_away):
    """Each asked at every change of any pod. An error is told to all of them."""
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: clock.seconds))
    server = LogServer({"p": []} if is_away else {})
    pods = logs.Pods(App(resources=server, ref=REF), lambda: False)
    for step in range(50):
        clock.seconds = step / 10
        with pytest.raises(EngineError) if is_away else nullcontext():
            assert pods.look() is False
    assert server.lists == 5


@pytest.fixture
def keep(tmp_path, monkeypatch):
    """A function that cancels an app with these logs. Returns what is kept by pod, and the line for the user."""

    def run(logs):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        lines, stops = [], []
        known = {"phase": "Running", "role": "w"}
        pods = [SimpleNamespace(**known, index=index, name=name, uid=name) for index, name in enumerate(logs)]
        app = App(resources=LogServer(logs), ref=REF)
        stop_and_keep_logs(app, lambda: pods, lambda: stops.append(1), lines.append)
        [line], [_] = lines, stops
        kept = (tmp_path / "muster/kubernetes-logs/team/job").glob("*.log")
        return {path.name.split(".")[1]: path.read_bytes() for path in kept}, line

    return run


@pytest.mark.parametrize(
    ("chunks", "kept"),
    [
        ([b"0123456\n"] * 10, b"0123456\n" * 10),
        ([b"first\n", *[b"0123456\n"] * 12], b"0123456\n" * 12),
        ([b"0123456\n"] * 30, b"0123456\n" * 12),
        ([b"0123456\n" * 30], b"0123456\n" * 12),  # nothing comes after it was trimmed
        ([b"0123456\n", EngineError("the stream broke")], b"0123456\n"),
    ],
    ids=["short", "a line", "many lines", "one chunk", "broken"],
)
def test_whole_lines_of_the_end_of_a_log_are_kept(keep, monkeypatch, chunks, kept):
    """People look at the end. What a broken log had is kept, too."""
    monkeypatch.setattr(logs, "LOG_LIMIT_BYTES", 100)
    found, line = keep({"p": chunks})
    assert found == {"p": kept}
    assert "kept in /" in line
    assert ("of p are" in line) == isinstance(chunks[-1], Exception)


@pytest.mark.parametrize("more", [{"p0": [b"one\n"]}, {}], ids=["one", "none"])
def test_pods_without_a_log_are_named_up_to_five(keep, more):
    lost = {f"p{number}": [EngineError(f"no log of p{number}")] for number in range(1, 8)}
    found, line = keep({**more, **lost})
    assert ("kept in /" in line, len(found)) == (bool(more), len(more))
    assert "p1, p2, p3, p4, p5 and 2 more " in line
    assert line.endswith(": no log of p1")


def test_a_kept_log_that_is_no_file_is_an_error_and_a_hole_is_its_end(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = logs.find_folder(REF)
    folder.mkdir(parents=True, mode=0o700)
    os.mkfifo(folder / "w-0.u0.log")
    with (folder / "w-0.u1.log").open("wb") as file:
        file.write(b"a\nb\n")
        file.truncate(20 << 30)
    kept = logs.read_kept_logs(REF, "w", 0)
    with pytest.raises(OSError, match="a regular file"):
        next(kept["u0"])
    assert b"".join(kept["u1"]).rstrip(b"\0") == b"a\nb\n"
