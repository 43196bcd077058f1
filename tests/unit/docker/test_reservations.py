"""What apps must not share, on a scripted engine: GPUs, and ports of the host's network."""

import pytest
from docker_samples import build_facts
from hypothesis import given
from hypothesis import strategies as st
from torchx.specs import AppDef, Resource, Role

from muster._shared.contract import Env
from muster.schedulers.docker.container_body import ImageFacts
from muster.schedulers.docker.options import DockerOptions
from muster.schedulers.docker.request import RequestBuilder
from muster.schedulers.docker.running_apps import creation, reservations
from muster.schedulers.docker.running_apps.creation import Payload
from muster.schedulers.docker.sdk import DockerError
from muster.schedulers.docker.spec import HOST_PORTS


class ScriptedEngine:
    """Volumes as on a real engine: the first caller's labels stay. Records what was created."""

    def __init__(self, *, busy_gpus=(), busy_ports=()):
        self.volumes = {}
        self.busy_gpus = busy_gpus
        self.busy_ports = busy_ports
        self.bodies = {}
        self.made = []

    def create_volume(self, name, labels):
        return self.volumes.setdefault(name, labels)

    def list_volumes(self, labels):
        return {
            name: known
            for name, known in self.volumes.items()
            if all(label in known and value in (None, known[label]) for label, value in labels.items())
        }

    def remove_volume(self, name):
        self.volumes.pop(name, None)

    def list_containers(self, labels, *, running_only):
        return [build_facts(id=gpu, gpu_ids=(gpu,), status="running", exit_code=None) for gpu in self.busy_gpus]

    def count_cpus(self):
        return 2

    def inspect_image(self, image):
        return ImageFacts(id=image, working_dir="/app", user="")

    def create_network(self, name, labels):
        self.made.append(name)

    def remove_network(self, name):
        self.made.remove(name)

    def create_container(self, name, body):
        self.made.append(name)
        self.bodies[name] = body
        return name

    def remove_container(self, container):
        self.made.remove(container)

    def copy_in(self, container, folder, archive):
        pass

    def start_container(self, container):
        assert self.bodies[container]["HostConfig"]["NetworkMode"] == "host"

    def wait_container(self, container, limit_s):
        return 0

    def logs(self, container):
        ports = [word for word in self.bodies[container]["Cmd"] if word.isdigit()]
        free = (port for port in ports if int(port) not in self.busy_ports)
        return iter([(1, f"muster-probe: {' '.join(free)}\n".encode())])


def request_of(name, *gpus, network=None, roles=("w",)):
    """An app with one replica of each role, or with one replica per count of GPUs."""
    agent = {"image": "img", "entrypoint": "python3", "args": ["-m", "muster.agent", "main.py"]}
    plain = {"image": "img", "entrypoint": "true"}
    if gpus:
        made = [Role(name=f"w{i}", resource=Resource(cpu=1, gpu=n, memMB=1), **plain) for i, n in enumerate(gpus)]
    else:
        made = [Role(name=role, resource=Resource(cpu=1, gpu=0, memMB=1), **agent) for role in roles]
    options = DockerOptions(network=network)
    app = AppDef(name=name, roles=made)
    return RequestBuilder(app=app, options=options, name=name, token="t", user="0@here").build()


def submit(engine, request, visible=()):
    free = reservations.check_gpus(engine, request, visible)
    return creation.create_app(engine, request, Payload(agent=b"", workspaces={}), free)


def gpus_of(request):
    return [container.gpu_ids for container in request.containers]


def test_each_replica_has_devices_of_its_own_and_the_engine_gets_their_ids():
    engine = ScriptedEngine()
    request = submit(engine, request_of("a", 1, 0, 2), ["GPU-a", "GPU-b", "GPU-c", "GPU-d"])
    assert gpus_of(request) == [("GPU-a",), (), ("GPU-b", "GPU-c")]
    asked = [body["HostConfig"].get("DeviceRequests") for body in engine.bodies.values()]
    capabilities = [["gpu", "compute", "utility"]]
    assert asked == [
        [{"DeviceIDs": ["GPU-a"], "Capabilities": capabilities}],
        None,
        [{"DeviceIDs": ["GPU-b", "GPU-c"], "Capabilities": capabilities}],
    ]


def test_too_few_devices_are_refused_before_anything_is_created():
    engine = ScriptedEngine(busy_gpus=["GPU-a"])
    with pytest.raises(DockerError, match=r"2 GPUs \(1\+1\), .* 1 of them"):
        submit(engine, request_of("a", 1, 1), ["GPU-a", "GPU-b"])
    assert (engine.made, engine.volumes) == ([], {})


def test_apps_do_not_share_devices_and_those_of_an_ended_one_are_free_again():
    engine = ScriptedEngine()
    first = submit(engine, request_of("a", 1), ["GPU-a", "GPU-b"])
    second = submit(engine, request_of("b", 1), ["GPU-a", "GPU-b"])
    assert (gpus_of(first), gpus_of(second)) == ([("GPU-a",)], [("GPU-b",)])
    with pytest.raises(DockerError, match=r"2 .*: a, b$"):
        submit(engine, request_of("c", 1), ["GPU-a", "GPU-b"])
    reservations.release_reservations(engine, first.labels)
    assert gpus_of(submit(engine, request_of("c", 1), ["GPU-a", "GPU-b"])) == [("GPU-a",)]


@given(wants=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=2, max_size=5))
def test_each_device_goes_to_one_of_the_apps_that_listed_it_at_the_same_time(wants):
    engine = ScriptedEngine()
    devices = [f"GPU-{number}" for number in range(6)]
    looked = [(request_of(f"app{i}", *gpus), devices) for i, gpus in enumerate(wants)]  # all before any has claimed
    given_out = []
    for request, free in looked:
        held, made = dict(engine.volumes), list(engine.made)
        try:
            given_out += gpus_of(creation.create_app(engine, request, Payload(agent=b"", workspaces={}), free))
        except DockerError:
            reservations.release_reservations(engine, request.labels)
            assert (engine.volumes, engine.made) == (held, made)
    flat = [gpu for ids in given_out for gpu in ids]
    assert len(set(flat)) == len(flat)


def port_of(request, role="w"):
    (port,) = {each.env[Env.RDZV_PORT] for each in request.containers if each.role == role}
    return int(port)


def test_job_on_the_hosts_network_gets_its_preferred_port():
    engine = ScriptedEngine()
    wished = port_of(request_of("a", network="host"))
    assert port_of(submit(engine, request_of("a", network="host"))) == wished
    assert engine.bodies["a-w-0"]["Env"].count(f"{Env.RDZV_PORT}={wished}") == 1


def test_port_in_use_is_skipped():
    wished = port_of(request_of("a", network="host"))
    engine = ScriptedEngine(busy_ports=[wished, wished + 1])
    assert port_of(submit(engine, request_of("a", network="host"))) == wished + 2


def test_apps_with_the_same_preferred_port_get_different_ports(monkeypatch):
    monkeypatch.setattr("muster.schedulers.docker.request._pick_host_port", lambda *_: HOST_PORTS[-1])
    engine = ScriptedEngine()
    requests = [request_of("a", network="host", roles=("w", "x")), request_of("b", network="host")]
    first, second = (submit(engine, request) for request in requests)
    ports = [port_of(first, "w"), port_of(first, "x"), port_of(second, "w")]
    assert sorted(ports) == [HOST_PORTS[0], HOST_PORTS[1], HOST_PORTS[-1]]
    reservations.release_reservations(engine, first.labels)
    assert port_of(submit(engine, request_of("c", network="host"))) == HOST_PORTS[-1]


def test_no_free_port_is_one_line_and_leaves_nothing():
    engine = ScriptedEngine(busy_ports=HOST_PORTS)
    with pytest.raises(DockerError, match=r"'w': .* \(64 tried from \d+ on\)"):
        submit(engine, request_of("a", network="host"))
    assert (engine.made, engine.volumes) == ([], {})


def test_jobs_with_a_network_of_their_own_reserve_nothing():
    engine = ScriptedEngine()
    request = submit(engine, request_of("a"))
    assert engine.volumes == {}
    assert Env.RDZV_PORT not in request.containers[0].env
