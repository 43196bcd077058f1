"""Requests to what is no API server of Kubernetes, and to one whose node does not answer."""

from types import SimpleNamespace

import pytest

from muster.schedulers.kubernetes.api.client import Client
from muster.schedulers.kubernetes.api.connection import Access
from muster.schedulers.kubernetes.api.errors import ApiError, Unreachable


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b"<html>\n  <body>Log in</body></html>", "'<html> <body>Log in</body></html>'"),
        (b'["a"]', "'[\"a\"]'"),
        (b"\xff" * 1000, repr("\N{REPLACEMENT CHARACTER}" * 100)),
    ],
)
def test_a_page_in_place_of_an_object_is_one_line(body, shown):
    """It was a traceback."""
    pool = SimpleNamespace(request=lambda *_args, **_more: SimpleNamespace(status=200, data=body), clear=lambda: None)
    connection = SimpleNamespace(host="https://web", origin="context c", pool=pool, build_auth_headers=dict)
    client = Client(Access(), connect=lambda _access: connection)
    with pytest.raises(Unreachable) as error:
        client.request("GET", "/apis/batch/v1/jobs", what="jobs", verb="list")
    assert f": it sent {shown}" in str(error.value)


def test_a_node_that_does_not_answer_is_not_told_as_the_server():
    """It said "the API server does not answer: trying again for 150 s", and tried for less."""
    answers = [SimpleNamespace(status=200, data=b"{}", headers={})]
    gone = SimpleNamespace(status=500, data=b"dial: no route to host", headers={})
    pool = SimpleNamespace(request=lambda *_a, **_m: answers.pop() if answers else gone, clear=lambda: None)
    connection = SimpleNamespace(host="https://web", origin="context c", pool=pool, build_auth_headers=dict)
    sleeps, lines = [], []
    clock = SimpleNamespace(now_s=lambda: sum(sleeps), sleep=sleeps.append)
    client = Client(Access(), connect=lambda _access: connection, clock=clock, notify=lines.append)
    client.request("GET", "/version", what="the version", verb="read")
    with pytest.raises(ApiError):
        client.read_bytes("/log", what="log of p", query={}, limit_s=30.0)
    assert sum(sleeps) > 3
    assert lines == []
    with pytest.raises(ApiError):
        client.request("GET", "/version", what="the version", verb="read")
    said = "does not answer (500 dial: no route to host): trying again for 150 s"
    assert lines == [f"the API server https://web {said}"]
