"""Log lines, app ids and refusals: every line once, in order, over any breaks. No sockets, no clocks."""

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.kubernetes.api.connection import Access
from muster.schedulers.kubernetes.api.errors import Refusal, explain
from muster.schedulers.kubernetes.app_id import AppRef, parse_app_id
from muster.schedulers.kubernetes.live.kept_logs import keep_logs
from muster.schedulers.kubernetes.live.logs import (
    ConnectionLimits,
    Position,
    convert_to_stamp,
    format_stamp,
    split_stamp,
)
from muster.schedulers.kubernetes.live.watch import PodWatch
from muster.schedulers.timestamps import parse_timestamp

pytestmark = pytest.mark.torchx


def test_stamps_in_any_zone_and_precision():
    assert parse_timestamp("2026-01-01T00:00:00.5Z") == parse_timestamp("2026-01-01T02:00:00.500000000+02:00")
    assert parse_timestamp("2026-01-01T00:00:00.12Z") > parse_timestamp("2026-01-01T00:00:00.119999999Z")
    assert format_stamp(parse_timestamp("2026-01-01T00:00:07.9Z")) == "2026-01-01T00:00:07Z"
    zone = timezone(timedelta(hours=2))
    assert convert_to_stamp(datetime(2026, 1, 1, 2, tzinfo=zone)) == parse_timestamp("2026-01-01T00:00:00Z")


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
    position, got, start = Position(None), [], None
    for stop in [*sorted(breaks), len(log)]:
        since = position.resume()
        start = parse_timestamp(since)[0] if since else None
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
    with pytest.raises(SchedulerError, match="is not of the form NAMESPACE:NAME"):
        parse_app_id(wrong)


@pytest.mark.parametrize(
    ("status", "reason", "message", "path", "expected"),
    [
        (401, "Unauthorized", "Unauthorized", "/api/v1/x", "does not accept these credentials; log in again"),
        (
            403,
            "Forbidden",
            "jobs is forbidden",
            "/x",
            "is not allowed to create job/a: jobs is forbidden; ask",
        ),
        (403, "Forbidden", "exceeded quota: q", "/x", "exceeds the namespace's quota"),
        (403, "Forbidden", 'violates PodSecurity "restricted"', "/x", "try -cfg security=restricted"),
        (404, "NotFound", 'namespaces "n" not found', "/x", "namespace 'n' does not exist; create it"),
        (404, "", "404 page not found", "/apis/jobset.x-k8s.io/v1alpha2/x", "JobSet is not installed in this cluster"),
        (409, "AlreadyExists", "x", "/x", "job/a already exists; choose another --name"),
        (422, "Invalid", "spec.x: bad\n too", "/x", "the cluster rejected job/a: spec.x: bad too"),
        (413, "", "too large", "/x", "job/a is too large"),
        (500, "", "boom", "/x", "responded with 500 boom"),
    ],
)
def test_refusals_say_what_to_do_in_one_line(status, reason, message, path, expected):
    import json

    body = json.dumps({"reason": reason, "message": message}).encode()
    error = explain(Refusal.parse(status, body), verb="create", what="job/a", path=path, origin="context 'c'")
    assert expected in str(error)
    assert "\n" not in str(error)


def test_a_bug_in_the_watch_is_an_error_of_its_readers():
    """They waited for ever."""

    class Broken:
        def list_all(self, *_args, **_more):
            raise KeyError("uid")

    watch = PodWatch(Broken(), AppRef(namespace="n", name="app"), elastic_role="", check_ended=lambda: False)
    with pytest.raises(EngineError, match=r"^cannot follow the pods of app: KeyError\('uid'\)$"), watch:
        pass


def test_readers_ask_at_most_every_two_seconds_whether_the_app_has_ended():
    """They asked at every change of any pod, each."""

    class Hands:
        def __init__(self):
            self.seconds = 0.0

        def now_s(self):
            return self.seconds

        def sleep(self, seconds):
            raise AssertionError(seconds)

    checks, clock = [], Hands()
    ref = AppRef(namespace="ns", name="app-x1")
    watch = PodWatch(None, ref, elastic_role="", check_ended=lambda: bool(checks.append(clock.seconds)), clock=clock)
    for step in range(50):
        clock.seconds = step / 10
        assert watch.has_app_ended() is False
    assert checks == [0.0, 2.0, 4.0]


@pytest.mark.parametrize(("spare", "said"), [(1, ""), (0, " (of each the first 16 MiB)")])
def test_a_kept_log_that_lacks_its_end_is_said(tmp_path, monkeypatch, spare, said):
    class Cluster:
        def read_bytes(self, path, *, what, query):
            return b"\n" * (int(query["limitBytes"]) - spare)

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    lines = []
    ref = AppRef(namespace="team", name="job")
    pod = SimpleNamespace(phase="Running", index=0, role="w", name="job-w-0")
    keep_logs(Cluster(), ref, lambda: [pod], lines.append)
    assert lines[0].endswith(f"is kept in {tmp_path}/muster/kubernetes-logs/team/job{said}")
