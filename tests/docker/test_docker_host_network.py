"""Apps on the host's own network, where each port can be used once: jobs with the same preferred port get two."""

import concurrent.futures
import socket

import pytest
from torchx.specs import AppState

from muster._shared.contract import Env
from muster.components import dist
from muster.schedulers.docker.spec import HOST_PORTS

pytestmark = pytest.mark.docker

PROGRAM = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"


@pytest.fixture
def submit(apps, tmp_path):
    code = tmp_path / "code"  # the state, which each of two submissions at once changes, is beside it
    code.mkdir()
    (code / "main.py").write_text(PROGRAM)

    def run(number):
        app = dist.ddp(script="main.py", j="2x1", image="muster-test:torch", name=f"job{number}", start="cold")
        return apps.run(app, workspace=str(code), network="host")

    return run


def port_of(apps, app_id):
    """The rendezvous port of the job."""
    environments = [container.attrs["Config"]["Env"] for container in apps.containers(app_id)]
    (port,) = {line.partition("=")[2] for env in environments for line in env if line.startswith(f"{Env.RDZV_PORT}=")}
    return int(port)


def test_jobs_with_one_preferred_port_get_two_others_than_a_port_in_use(apps, submit, monkeypatch):
    wished = HOST_PORTS[0]
    monkeypatch.setattr("muster.schedulers.docker.request._pick_host_port", lambda *_: wished)
    with socket.create_server(("", wished)), concurrent.futures.ThreadPoolExecutor(2) as pool:
        ids = list(pool.map(submit, range(2)))
        ports = sorted(port_of(apps, app_id) for app_id in ids)
        ends = [apps.wait(app_id) for app_id in ids]
    assert [end.state for end in ends] == [AppState.SUCCEEDED] * 2, [end.msg for end in ends]
    assert wished < ports[0] < ports[1]
    for app_id in ids:  # released at the end
        claimed = {"label": ["io.muster.claim", f"io.muster.app={app_id}"]}
        assert apps.client.volumes.list(filters=claimed) == []
