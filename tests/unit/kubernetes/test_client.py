"""Requests to what is no API server of Kubernetes."""

from types import SimpleNamespace

import pytest

from muster.schedulers.kubernetes.api.client import Client
from muster.schedulers.kubernetes.api.connection import Access
from muster.schedulers.kubernetes.api.errors import Unreachable

pytestmark = pytest.mark.torchx


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
    assert str(error.value) == f"https://web (context c) is no API server of Kubernetes: it sent {shown}"
