"""The request: pure, offline, deterministic; without an engine."""

import copy
import json
import socket

import pytest
from docker_samples import parse_words
from torchx.specs import AppDef, BindMount, DeviceMount, Resource, Role, VolumeMount

from muster._shared.contract import Env, RoleKey
from muster.schedulers.docker import spec
from muster.schedulers.docker.container_body import ImageFacts, build_body, build_container_name, parse_user
from muster.schedulers.docker.request import WORKSPACE_KEY, RequestBuilder
from muster.schedulers.errors import OptionError, SchedulerError

IMAGE = ImageFacts(id="sha256:abc", working_dir="/app", user="")
AGENT_ARGS = ["-m", "muster.agent", "--node-rank", "${replica_id}", "--rdzv-id", "${app_id}", "main.py"]


def role(**how):
    given = {"name": "train", "image": "img", "entrypoint": "python3", "args": AGENT_ARGS, "num_replicas": 2}
    given["resource"] = Resource(cpu=2, gpu=0, memMB=1024)
    return Role(**given | how)


def request_of(*roles, words="", environ=None):
    app = AppDef(name="job", roles=list(roles or (role(),)))
    how = {"name": "job-x", "token": "s3cret", "user": "0@here", "environ": environ or {}}
    return RequestBuilder(app=app, options=parse_words(words), **how).build()


def body_of(request, index=0, **how):
    facts = {"incarnation": 0, "image": IMAGE, "cpus": 4, **how}
    return build_body(request, request.containers[index], **facts)


def test_input_is_not_changed_and_output_is_the_same_twice(monkeypatch):
    def refuse(*_):
        raise AssertionError("the dry run used the network")

    monkeypatch.setattr(socket, "socket", refuse)
    app = AppDef(name="job", roles=[role(mounts=[BindMount(src_path="/a", dst_path="/b")])])
    before = copy.deepcopy(app)
    how = {"name": "job-x", "token": "t", "user": "u"}
    made = [RequestBuilder(app=app, options=parse_words(), **how).build() for _ in range(2)]
    assert app == before
    assert made[0] == made[1]


def test_dry_run_shows_no_secret():
    env = {"API_TOKEN": "hidden", "SEEN": "yes", "TAKEN": "from a file"}
    shown = request_of(role(env=env, metadata={RoleKey.SECRET_ENV: "TAKEN"})).show()
    assert "s3cret" not in shown
    assert "hidden" not in shown
    assert "from a file" not in shown
    assert "SEEN: 'yes'" in shown
    assert "muster-agent.zip" in shown


def test_environment_precedence():
    environ = {"FOO_A": "copied", "FOO_B": "copied", "BAR": "not copied"}
    request = request_of(
        role(env={"FOO_C": "role"}), words="copy_env=FOO_*,env=FOO_B:given;FOO_C:given", environ=environ
    )
    env = request.containers[0].env
    assert (env["FOO_A"], env["FOO_B"], env["FOO_C"]) == ("copied", "given", "role")
    assert "BAR" not in env


@pytest.mark.parametrize(
    ("how", "limit"),
    [
        ({}, 1024 << 20),
        ({"metadata": {RoleKey.MEMORY_REQUEST_MB: "4096"}}, None),
        ({"resource": Resource(cpu=1, gpu=0, memMB=-1)}, None),
    ],
)
def test_memory_is_limited_only_when_requested(how, limit):
    host = body_of(request_of(role(**how)))["HostConfig"]
    assert host.get("Memory") == limit
    assert host.get("MemorySwap") == limit
    assert host["ShmSize"] == (limit or spec.DEFAULT_SHM_BYTES)


def test_cpu_limit_is_never_more_than_the_engine_has():
    host = body_of(request_of(role(resource=Resource(cpu=64, gpu=0, memMB=1))))["HostConfig"]
    assert host["NanoCpus"] == 4 * 10**9


def test_mounts_and_devices():
    mounts = [
        BindMount(src_path="/a", dst_path="/b", read_only=True),
        VolumeMount(src="v", dst_path="/v"),
        DeviceMount(src_path="/dev/x", dst_path="/dev/y", permissions="r"),
    ]
    host = body_of(request_of(role(mounts=mounts)))["HostConfig"]
    assert host["Mounts"] == [
        {"Type": "bind", "Source": "/a", "Target": "/b", "ReadOnly": True},
        {"Type": "volume", "Source": "v", "Target": "/v", "ReadOnly": False},
    ]
    assert host["Devices"] == [{"PathOnHost": "/dev/x", "PathInContainer": "/dev/y", "CgroupPermissions": "r"}]


def test_engine_never_restarts_or_removes_by_itself():
    host = body_of(request_of())["HostConfig"]
    assert host["RestartPolicy"] == {"Name": "no"}
    assert host["AutoRemove"] is False


def test_options_reach_the_engine():
    words = "privileged=true,shm_size=2g,ipc=host,ulimits=nofile:10:20,grace_s=37,network=net,read_only=true"
    request = request_of(words=words)
    body = body_of(request)
    host = body["HostConfig"]
    assert host["Privileged"] is True
    assert host["IpcMode"] == "host"
    assert "ShmSize" not in host  # the engine refuses it together with the host's IPC
    assert {"Name": "nofile", "Soft": 10, "Hard": 20} in host["Ulimits"]
    assert body["StopTimeout"] == 37
    assert host["ReadonlyRootfs"] is True
    assert (request.network, request.owns_network) == ("net", False)
    # other apps may use that network too
    assert body["NetworkingConfig"]["EndpointsConfig"]["net"]["Aliases"] == ["job-x-train-0", "job-x-rank0"]
    assert request.containers[1].env[Env.RANK0_HOST] == "job-x-rank0"


def test_host_network_has_no_names():
    request = request_of(words="network=host")
    body = body_of(request)
    assert "NetworkingConfig" not in body
    assert "Hostname" not in body
    assert request.containers[1].env[Env.RANK0_HOST] == "127.0.0.1"
    assert request.containers[0].env[Env.RDZV_PORT] == request.containers[1].env[Env.RDZV_PORT]


def test_image_repo_builds_from_base_and_workspace():
    (first, _) = request_of(role(metadata={WORKSPACE_KEY: "ws.tar.gz"}), words="image_repo=repo/x").containers
    assert (first.base_image, first.image) == ("img", "repo/x:job-x-train")
    (first, _) = request_of(role(metadata={WORKSPACE_KEY: "ws.tar.gz"})).containers
    assert (first.base_image, first.image, first.workspace) == (None, "img", "ws.tar.gz")


def test_workspace_goes_to_the_images_folder_but_never_to_its_root():
    request = request_of(role(metadata={WORKSPACE_KEY: "ws.tar.gz"}))
    assert body_of(request)["WorkingDir"] == "/app"
    rootless = ImageFacts(id="x", working_dir="", user="")
    assert body_of(request, image=rootless)["WorkingDir"] == "/workspace"
    assert body_of(request_of(), image=rootless)["WorkingDir"] == "/"


def test_an_agent_that_is_started_again_is_told_so():
    agents, plain = request_of(), request_of(role(entrypoint="sh", args=["-c", "exit 0"]))
    assert f"{Env.INCARNATION}=2" in body_of(agents, incarnation=2)["Env"]
    assert not [each for each in body_of(agents)["Env"] if each.startswith(Env.INCARNATION)]
    alone = body_of(agents, incarnation=2, is_alone=True)["Env"]
    assert not [each for each in alone if each.startswith(Env.INCARNATION)]
    assert f"{Env.JOB_INCARNATION}=3" in alone, "for a line in the log"
    assert not [each for each in body_of(plain, incarnation=2)["Env"] if each.startswith(Env.INCARNATION)]


def test_every_container_has_labels_and_a_unique_name():
    request = request_of()
    labels = body_of(request, 1, incarnation=2)["Labels"]
    assert labels[spec.Label.APP] == "job-x"
    assert (labels[spec.Label.REPLICA], labels[spec.Label.INCARNATION]) == ("1", "2")
    names = {build_container_name(each, number) for each in request.containers for number in range(2)}
    assert names == {"job-x-train-0", "job-x-train-0-r1", "job-x-train-1", "job-x-train-1-r1"}


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"image": ""}, "'train' has no image"),
        ({"num_replicas": 0}, "num_replicas"),
        ({"min_replicas": 3}, "min_replicas"),
        ({"mounts": [BindMount(src_path="rel", dst_path="/b")]}, "'rel' needs an absolute path"),
        ({"mounts": ["nonsense"]}, "'nonsense' is not a bind mount"),
        ({"resource": Resource(cpu=1, gpu=0, memMB=1, devices={"x/y": 1})}, "unknown device 'x/y'"),
    ],
)
def test_impossible_roles_are_refused_in_one_line(how, says):
    with pytest.raises(SchedulerError, match=says) as raised:
        request_of(role(**how))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("shm_size=lots", "shm_size='lots'"),
        ("shm_size=0", "shm_size='0'"),
        ("pull=often", "pull='often' is not one of missing, always, never"),
        ("keep=some", "keep='some'"),
        ("agent=mine", "agent='mine'"),
        ("ipc=shared", "ipc='shared'"),
        ("network=none", "network='none' cannot connect replicas"),
        ("grace_s=-1", "grace_s=-1"),
        ("ulimits=nofile", "'nofile' is not NAME:SOFT"),
        ("shmsize=1g", "no option 'shmsize'; did you mean 'shm_size'"),
    ],
)
def test_impossible_options_are_refused_in_one_line(words, says):
    with pytest.raises(OptionError, match=says) as raised:
        parse_words(words)
    assert "\n" not in str(raised.value)


def test_user_of_an_image():
    passwd = "root:x:0:0::/root:/bin/sh\nann:x:1000:1001::/home/ann:/bin/sh\nbroken\n"
    assert parse_user("ann", passwd) == (1000, 1001)
    assert parse_user("1000", passwd) == (1000, 1001)
    assert parse_user("1000:7", passwd) == (1000, 7)
    assert parse_user("4000", passwd) == (4000, 0)
    assert parse_user("nobody-knows", passwd) == (0, 0)


def test_compile_caches_are_on_a_volume_of_the_user():
    request = request_of(role(env={"TRITON_CACHE_DIR": "/mine"}), words="compile_cache=llama")
    container = request.containers[0]
    caches = {name: text for name, text in container.env.items() if "CACHE" in name}
    assert caches == {
        "TORCHINDUCTOR_CACHE_DIR": "/var/opt/muster-cache/inductor",
        "TRITON_CACHE_DIR": "/mine",
        "CUDA_CACHE_PATH": "/var/opt/muster-cache/cuda",
    }
    (mount,) = body_of(request)["HostConfig"]["Mounts"]
    assert (mount["Type"], mount["Target"]) == ("volume", "/var/opt/muster-cache")
    assert mount["Source"].startswith("muster-cache-")
    assert mount["Source"].endswith("-llama")
    assert mount["VolumeOptions"] == {"Labels": {"io.muster.cache": "llama", "io.muster.user": "0@here"}}
    app = AppDef(name="job", roles=[role()])
    options = parse_words("compile_cache=llama")
    other = RequestBuilder(app=app, options=options, name="j", token="t", user="1@here").build()
    assert other.containers[0].mounts[0]["Source"] != mount["Source"]
    assert spec.AppRequest.from_json(json.loads(json.dumps(request.to_json()))) == request
    assert not request_of().containers[0].mounts
    for name in ("a/b", "-a", "x" * 65):
        with pytest.raises(OptionError, match="compile_cache="):
            parse_words(f"compile_cache={name}")
