"""dist.ddp, dist.spmd, dist.torchrun: TorchX's parameters in, an AppDef that runs the agent out."""

import copy
import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torchx.components.dist as theirs
from torchx import specs
from torchx.specs import macros
from torchx.specs.builders import materialize_appdef
from torchx.specs.finder import ComponentValidationException, get_components

from muster._shared.contract import AGENT_MODULE, RoleKey
from muster.components import application, dist
from muster.components.flags import FLAGS

OUR_NAMES = ("ddp", "spmd", "torchrun")
THEIR_NAMES = tuple(name for name in OUR_NAMES if hasattr(theirs, name))
OURS = [getattr(dist, name) for name in OUR_NAMES]
GPU_HOST = "aws_p4d.24xlarge"  # 8 GPUs


def only_role(app: specs.AppDef) -> specs.Role:
    (role,) = app.roles
    return role


def flag(app: specs.AppDef, name: str) -> str:
    """The value of one of the agent's flags."""
    args = only_role(app).args
    return args[args.index(name) + 1]


def build_theirs(component: str, /, *args: str, **arguments: Any) -> specs.AppDef:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nightly's deprecation notices
        return getattr(theirs, component)(*args, **copy.deepcopy(arguments))


@pytest.mark.torchx
@pytest.mark.parametrize("name", THEIR_NAMES)
def test_every_parameter_of_torchx_is_there_with_its_default(name: str) -> None:
    our_parameters = inspect.signature(getattr(dist, name)).parameters
    for parameter in inspect.signature(getattr(theirs, name)).parameters.values():
        ours = our_parameters[parameter.name]
        assert ours.kind == parameter.kind
        assert ours.default == parameter.default
        assert repr(ours.default) == repr(parameter.default)  # what --help shows


@pytest.mark.torchx
@pytest.mark.parametrize("name", THEIR_NAMES)
@pytest.mark.parametrize(
    "arguments",
    [
        {"script": "dir/my-train.py"},
        {"m": "package.train", "j": "2x1", "name": "exp/run"},
        {"script": "main.py", "name": "exp/", "env": {"A": "1", "LOGLEVEL": "INFO"}},
        {"script": "main.py", "max_retries": 3, "debug": True, "env": {"NCCL_DESYNC_DEBUG": "0"}},
        {
            "script": "main.py",
            "mounts": ["type=bind", "src=/a", "dst=/b", "readonly", "type=volume", "src=v", "dst=/v"],
        },
        {"script": "main.py", "image": "registry/image:1", "h": GPU_HOST, "j": "2x8"},
        {"script": "main.py", "h": GPU_HOST, "j": "1"},
    ],
)
def test_the_appdef_is_torchxs_but_for_the_command(name: str, arguments: dict[str, Any]) -> None:
    ours = getattr(dist, name)("--lr", "1", **copy.deepcopy(arguments))
    their_app = build_theirs(name, "--lr", "1", **arguments)
    assert ours.name == their_app.name
    assert ours.metadata == their_app.metadata
    our_role, their_role = only_role(ours), only_role(their_app)
    # only nightly's sets the run's name
    expected_env = {"TORCHX_TRACKING_RUN_NAME": their_app.name, **their_role.env}
    assert our_role.env == expected_env
    for field in ("name", "image", "min_replicas", "num_replicas", "resource", "port_map", "max_retries", "mounts"):
        assert getattr(our_role, field) == getattr(their_role, field), field


@pytest.mark.torchx
@pytest.mark.parametrize("component", [dist.ddp, dist.torchrun])
@pytest.mark.parametrize("arguments", [{"cpu": 3, "gpu": 4, "memMB": 5000}, {"rdzv_port": 1234}, {"j": "2:3x1"}])
def test_the_rest_of_ddp_is_torchxs_too(component: Callable[..., Any], arguments: dict[str, Any]) -> None:
    our_role = only_role(component(script="main.py", **arguments))
    their_role = only_role(build_theirs("ddp", script="main.py", **arguments))
    for field in ("min_replicas", "num_replicas", "resource", "port_map"):
        assert getattr(our_role, field) == getattr(their_role, field), field


def test_the_command_is_the_agent_without_a_shell() -> None:
    app = dist.ddp("--lr", "0.1", script="dir/main.py", j="2:4x8", max_retries=3, rdzv_conf="join_timeout=60", tee=1)
    role = only_role(app)
    assert role.entrypoint == "python3"
    assert role.args == [
        *("-m", AGENT_MODULE, "--nnodes", "2:4", "--nproc-per-node", "8"),
        *("--node-rank", macros.replica_id, "--rank0-env", macros.rank0_env),
        *("--rdzv-backend", "c10d", "--rdzv-port", "29500", "--rdzv-id", macros.app_id),
        *("--rdzv-conf", "join_timeout=60", "--max-restarts", "3", "--role", "main", "--tee", "1"),
        *("--start", "auto", "--preload", "auto", "dir/main.py", "--lr", "0.1"),
    ]
    assert role.retry_policy == specs.RetryPolicy.REPLICA
    assert (role.min_replicas, role.num_replicas, role.max_retries) == (2, 4, 3)


def test_a_module_is_run_by_name() -> None:
    args = only_role(dist.ddp("--lr", "0.1", m="package.train")).args
    assert args[-4:] == ["-m", "package.train", "--lr", "0.1"]


@pytest.mark.parametrize("component", OURS)
def test_script_arguments_survive_as_they_are(component: Callable[..., Any]) -> None:
    words = ["-x", "--", "--nnodes", "7", "", "two words", "a'b\"c", "$HOME", "${local_rank}", "-m", "*", "é\n"]
    args = only_role(component(*words, script="main.py")).args
    assert args[args.index("main.py") + 1 :] == words


@pytest.mark.torchx
def test_script_arguments_survive_the_command_line() -> None:
    app = materialize_appdef(dist.ddp, ["--script", "main.py", "-j", "2x4", "--", "-x", "--", "--script", "b", "-j"])
    args = only_role(app).args
    assert args[args.index("main.py") :] == ["main.py", "-x", "--", "--script", "b", "-j"]
    app = materialize_appdef(dist.ddp, ["--script", "main.py", "in", "--lr=1"])
    assert only_role(app).args[-3:] == ["main.py", "in", "--lr=1"]


@pytest.mark.torchx
def test_every_argument_can_be_given_on_the_command_line() -> None:
    line = (
        "--m a.b --image i --name e/r --cpu 3 --gpu 4 --memMB 77 -j 1:2x4 --env A=1,B=2 --metadata K=v --max_retries 2"
    )
    line += " --rdzv_port 1 --rdzv_backend etcd --rdzv_conf join_timeout=1,last_call_timeout=2 --debug True --tee 0"
    line += " --mounts type=bind,src=/a,dst=/b --start cold --preload a,b --hang_timeout 1.5"
    app = materialize_appdef(dist.ddp, line.split())
    role = only_role(app)
    assert (app.name, app.metadata, role.image) == ("r", {"K": "v"}, "i")
    assert (role.resource.cpu, role.resource.gpu, role.resource.memMB) == (3, 4, 77)
    assert role.env["A"] == "1"
    assert role.env["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert role.port_map == {"c10d": 1}
    assert len(role.mounts) == 1
    expected = {
        "--nnodes": "1:2",
        "--rdzv-port": "1",
        "--rdzv-backend": "etcd",
        "--rdzv-conf": "join_timeout=1,last_call_timeout=2",
        "--max-restarts": "2",
        "--tee": "0",
        "--start": "cold",
        "--preload": "a,b",
        "--hang-timeout": "1.5",
    }
    assert {name: flag(app, name) for name in expected} == expected


@pytest.mark.parametrize("component", [dist.torchrun, dist.spmd])
def test_the_same_arguments_are_the_same_job(component: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "env").write_text("B=2\n")
    values: dict[str, Any] = {
        "script": "main.py",
        "image": "i",
        "name": "e/r",
        "j": "1:2x4",
        "metadata": {"K": "v"},
        "max_retries": 2,
        "env": {"A": "1"},
        "env_file": str(tmp_path / "env"),
        "mounts": ["type=bind", "src=/a", "dst=/b"],
        "debug": True,
        "start": "cold",
        "preload": "a,b",
        "hang_timeout": "1.5",
        "hang_action": "stop",
        "collapse_lines": "on",
        "notify": "tell",
        "metrics_port": "1",
        "tracker_run": True,
        "trainer_callback": True,
        "preflight": "full",
        "snapshot_memory": "64G",
        "snapshot_copies": 0,
        "spare_workers": 2,
        "rank_order": "segment",
        "on": "oom: stop",
        **({"h": GPU_HOST} if component is dist.spmd else {"cpu": 3, "gpu": 4, "memMB": 77, "tee": 0}),
        **({} if component is dist.spmd else {"rdzv_port": 1, "rdzv_backend": "etcd", "rdzv_conf": "join_timeout=1"}),
    }
    names = {name for name, each in inspect.signature(component).parameters.items() if each.kind != each.VAR_POSITIONAL}
    assert names - {"m", "h"} == set(values) - {"h"}
    used = {*re.findall(r"request\.(\w+)", inspect.getsource(application)), *(each.name for each in FLAGS)}
    assert names - {"cpu", "gpu", "memMB", "h"} <= used
    assert component("--lr", "1", **values) == dist.ddp("--lr", "1", **values)


@pytest.mark.parametrize("component", OURS)
def test_the_arguments_are_not_mutated(component: Callable[..., Any]) -> None:
    env, metadata, mounts = {"A": "1"}, {"K": "v"}, ["type=bind", "src=/a", "dst=/b"]
    app = component(script="main.py", env=env, metadata=metadata, mounts=mounts, debug=True)
    assert (env, metadata, mounts) == ({"A": "1"}, {"K": "v"}, ["type=bind", "src=/a", "dst=/b"])
    app.metadata["more"] = "x"
    only_role(app).env["more"] = "x"
    assert "more" not in env
    assert "more" not in metadata


def test_debug_sets_torchxs_four_variables() -> None:
    quiet = only_role(dist.ddp(script="main.py")).env
    loud = only_role(dist.ddp(script="main.py", debug=True)).env
    assert {name: value for name, value in loud.items() if name not in quiet} == theirs._TORCH_DEBUG_FLAGS


def test_loglevel_is_the_callers_then_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGLEVEL", "ERROR")
    assert only_role(dist.ddp(script="main.py")).env["LOGLEVEL"] == "ERROR"
    assert only_role(dist.ddp(script="main.py", env={"LOGLEVEL": "DEBUG"})).env["LOGLEVEL"] == "DEBUG"


@pytest.mark.parametrize(
    ("component", "arguments", "nnodes", "processes"),
    [
        (dist.ddp, {"j": "2"}, "1", "2"),
        (dist.ddp, {"j": "2", "h": GPU_HOST}, "1", "2"),
        (dist.torchrun, {"j": "2"}, "1", "2"),
        (dist.torchrun, {"j": "2", "h": GPU_HOST}, "2", "8"),
        (dist.spmd, {"j": "2", "h": GPU_HOST}, "2", "8"),
        (dist.spmd, {"j": "2"}, "2", "1"),
        (dist.spmd, {"j": "1:2x1"}, "1:2", "1"),
        (dist.spmd, {"j": "1:2xgpu", "h": GPU_HOST}, "1:2", "gpu"),
    ],
)
def test_what_a_bare_number_means(component, arguments, nnodes, processes) -> None:
    app = component(script="main.py", **arguments)
    assert (flag(app, "--nnodes"), flag(app, "--nproc-per-node")) == (nnodes, processes)


def test_the_default_memory_differs_from_the_same_number_given() -> None:
    request = {RoleKey.MEMORY_REQUEST_MB: "4096", RoleKey.CPU_REQUEST: "4"}
    assert only_role(dist.ddp(script="m.py", j="2x4")).metadata == request
    assert only_role(dist.ddp(script="m.py", j="2x4", cpu=2)).metadata == {RoleKey.MEMORY_REQUEST_MB: "4096"}
    assert only_role(materialize_appdef(dist.ddp, ["--script", "m.py"])).metadata == {RoleKey.MEMORY_REQUEST_MB: "2048"}
    for app in (
        dist.ddp(script="m.py", memMB=1024),
        dist.ddp(script="m.py", h="cpu.small"),
        dist.spmd(script="m.py"),
        materialize_appdef(dist.ddp, ["--script", "m.py", "--memMB", "1024"]),
        materialize_appdef(dist.ddp, ["--script", "m.py"], {"memMB": "1024"}),  # as from .torchxconfig
    ):
        assert only_role(app).metadata == {}
    assert only_role(dist.ddp(script="m.py", memMB=1024)).resource == only_role(dist.ddp(script="m.py")).resource
    assert type(only_role(dist.ddp(script="m.py")).resource.memMB) is int


@pytest.mark.parametrize(
    ("arguments", "request_mb"),
    [({"j": "1xcpu", "cpu": 3}, 3072), ({"j": "1xgpu", "gpu": 4}, 4096), ({"j": "1xauto"}, 2048), ({"j": "8"}, 8192)],
)
def test_memory_is_requested_per_process(arguments: dict[str, Any], request_mb: int) -> None:
    role = only_role(dist.ddp(script="m.py", **arguments))
    assert role.metadata[RoleKey.MEMORY_REQUEST_MB] == str(request_mb)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"j": "4:2x8"}, "-j '4:2x8' has a minimum of 4 nodes"),
        ({"j": "1x9", "h": GPU_HOST}, "-j '1x9' asks for 9 processes on each node, more than the 8 GPUs of -h aws_p4d"),
        ({"j": "1x3", "gpu": 2}, "-j '1x3' asks for 3 processes on each node, more than the 2 GPUs of --gpu 2"),
        ({"h": "no.such"}, "-h 'no.such' is not a named resource"),
        ({"max_retries": -1}, "--max_retries -1 is negative"),
        ({"tee": 4}, "--tee 4 is not one of 0"),
        ({"start": "hot"}, "--start 'hot' is not one of auto, warm, cold"),
        ({"rdzv_port": 65536}, "--rdzv_port 65536 is not a port"),
        ({"rdzv_port": 0, "j": "2x1"}, "--rdzv_port 0 works on one node only"),
        ({"rdzv_conf": "foo=3"}, "--rdzv_conf 'foo=3': unknown key 'foo'; the keys are join_timeout, "),
        ({"rdzv_conf": "join_timeout=soon"}, "--rdzv_conf 'join_timeout=soon': join_timeout=soon is not a number of"),
        ({"rdzv_conf": "timeout"}, "--rdzv_conf 'timeout': 'timeout' is not key=value"),
        ({"rdzv_conf": "timeout=1,"}, "--rdzv_conf 'timeout=1,': '' is not key=value"),
        ({"hang_timeout": -1.0}, "--hang_timeout -1.0 is neither auto nor a number of seconds"),
        ({"hang_timeout": float("nan")}, "--hang_timeout nan is neither auto nor a number of seconds"),
        ({"memMB": 0}, "--memMB 0 is too small; it must be at least 1"),
        ({"gpu": -1}, "--gpu -1 is too small; it must be at least 0"),
        ({"mounts": ["type=bind", "src=/a"]}, "--mounts 'type=bind,src=/a': dst is missing"),
        ({"mounts": ["src=/a"]}, "--mounts 'src=/a': type must be specified first"),
        ({"mounts": ["type=nope"]}, "--mounts 'type=nope': invalid mount type"),
        ({"mounts": ["nope=1"]}, "--mounts 'nope=1': unknown mount option nope"),
        ({"notify": "tell 'me"}, """--notify "tell 'me": no closing quotation"""),
        ({"notify": " "}, "--notify is empty"),
        ({"rank_order": "rack"}, "--rank_order 'rack' is not one of node, segment"),
        *(
            ({"snapshot_memory": value}, f"--snapshot_memory {value!r}: must be a share of the free memory from 1% to ")
            for value in ("101%", "0%", "64Gi", "-1", "", "9999999999T")
        ),
        ({"spare_workers": -1}, "--spare_workers -1 is not 0 to 1024"),
        *(({"snapshot_copies": value}, f"--snapshot_copies {value} is not one of 0") for value in (-1, 2)),
        *(
            ({"metrics_port": value}, f"--metrics_port {value!r} is not [ADDRESS:]PORT")
            for value in ("x", "70000", "host:1", ":1", "[::1]", "-1", "")
        ),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(ComponentValidationException) as caught:
        dist.ddp(script="main.py", **arguments)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).startswith(line)
    assert len(str(caught.value).splitlines()) == 1


def test_a_wrong_type_of_mount_is_told_how_a_claim_is_mounted() -> None:
    with pytest.raises(ComponentValidationException, match=r": type=volume,src=NAME,dst=/job$"):
        dist.ddp(script="main.py", mounts=["type=pvc", "src=a", "dst=/b"])


def test_a_job_without_a_program_is_refused() -> None:
    with pytest.raises(ComponentValidationException, match="--script and -m"):
        dist.ddp()


@pytest.mark.torchx
def test_torchx_finds_ours_and_its_own() -> None:
    components = get_components()
    for name in OUR_NAMES:
        assert components[f"dist.{name}"].fn is getattr(dist, name)
    assert "utils.echo" in components
    assert not [name for name in components if name.startswith("dist.") and name[5:] not in OUR_NAMES]


def test_more_processes_than_the_default_host_has_gpus_come_with_advice() -> None:
    with pytest.raises(ComponentValidationException, match=r"default of -h; .* dist\.ddp"):
        dist.spmd(script="main.py", j="1x2")
    with pytest.raises(ComponentValidationException, match=r"1 GPU of -h gpu\.small; "):
        dist.ddp(script="main.py", j="1x2", h="gpu.small")


@pytest.mark.parametrize(
    ("parameter", "value", "words"),
    [
        ("notify", "tell --to 'all of us'", ["--notify=tell --to 'all of us'"]),
        ("metrics_port", "0.0.0.0:9464", ["--metrics-port", "0.0.0.0:9464"]),
        ("tracker_run", True, ["--tracker-run"]),
        ("trainer_callback", True, ["--trainer-callback"]),
        ("snapshot_memory", "64G", ["--snapshot-memory", "64G"]),
        ("snapshot_copies", 0, ["--snapshot-copies", "0"]),
        ("spare_workers", 2, ["--spare-workers", "2"]),
        ("rank_order", "segment", ["--rank-order", "segment"]),
    ],
)
def test_what_has_no_flag_by_default_is_passed_on_where_it_is_given(parameter, value, words) -> None:
    args = only_role(dist.ddp(script="main.py", **{parameter: value})).args
    at = args.index(words[0])
    assert args[at : at + len(words)] == words
    assert at < args.index("main.py")
    assert not any(word.startswith(words[0].partition("=")[0]) for word in only_role(dist.ddp(script="main.py")).args)
