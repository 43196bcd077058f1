"""Every manifest passes the published strict schemas; one golden file per flavour; size and purity."""

import base64
import copy
import hashlib
import json
import os
import re
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import yaml
from doubles import kubernetes_fields
from doubles.kubernetes_apps import find_pod_templates
from doubles.kubernetes_rules import check_create
from doubles.kubernetes_schemas import validate_published, validate_strictly
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torchx import specs

from muster._shared.contract import RoleKey
from muster.schedulers.errors import SchedulerError
from muster.schedulers.kubernetes.kube import APPDEF_ANNOTATION, find_submitter
from muster.schedulers.kubernetes.manifests.bundles import WORKSPACE_LIMIT_BYTES, decode_app, pack_workspace
from muster.schedulers.kubernetes.manifests.request import build_request, complete_documents
from muster.schedulers.kubernetes.schema import load_table, parse_version

ADDED = {"namespace": "team-a", "secret": "a-token", "submission_id": "s"}
GOLDEN = Path(__file__).parent / "golden"


def agent_role(**changes):
    nodes, least = changes.pop("nodes", 2), changes.pop("least", None)
    args = ["-m", "muster.agent", "--nnodes", str(nodes), "--node-rank", specs.macros.replica_id]
    args += [
        "--rank0-env",
        specs.macros.rank0_env,
        "--rdzv-id",
        specs.macros.app_id,
        "main.py",
        *changes.pop("script", []),
    ]
    given = {
        "name": "trainer",
        "image": "img:1",
        "entrypoint": "python3",
        "args": args,
        "num_replicas": nodes,
        "min_replicas": least,
        "resource": specs.Resource(cpu=2, gpu=0, memMB=2048),
        "retry_policy": specs.RetryPolicy.REPLICA,
    }
    return specs.Role(**{**given, **changes})


def plain_role(**changes):
    given = {
        "name": "echo",
        "image": "img:1",
        "entrypoint": "/bin/echo",
        "args": ["hello"],
        "num_replicas": 1,
        "resource": specs.Resource(cpu=1, gpu=0, memMB=512),
    }
    return specs.Role(**{**given, **changes})


def build(*roles, name="app-x1", workspaces=None, submitter="", **cfg):
    app = specs.AppDef(name="app", roles=list(roles))
    return build_request(app, cfg, name=name, workspaces=workspaces, submitter=submitter)


def pod_of(request):
    return next(find_pod_templates(request.documents))


def container_of(request):
    return pod_of(request)["spec"]["containers"][0]


def env_of(request):
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container_of(request)["env"]}


# -- the published schemas --------------------------------------------------------------------------------------------


def test_the_compact_table_equals_the_published_schemas():
    assert kubernetes_fields.PATH.read_text() == kubernetes_fields.render(kubernetes_fields.build_fields())


def versions():
    newest = load_table().newest
    return [f"1.{minor}" for minor in range(29, newest[1] + 1)]


FLAVORS = ("job", "jobset")


@pytest.mark.parametrize("version", versions())
@pytest.mark.parametrize("flavor", FLAVORS)
def test_every_flavour_passes_the_strict_schema(flavor, version):
    elastic = parse_version(version) >= (1, 31)
    request = build(
        agent_role(nodes=4, least=2 if elastic else None, max_retries=3),
        plain_role(num_replicas=2),
        flavor=flavor,
        kube_version=version,
        workspaces={},
    )
    for document in request.documents:
        validate_strictly(document, version)


TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=20)
NAMES = st.text(st.sampled_from("abcXYZ019-_. "), min_size=1, max_size=70).filter(lambda name: name not in (".", ".."))
MOUNTS = st.lists(
    st.one_of(
        st.builds(specs.BindMount, src_path=st.just("/data"), dst_path=st.just("/mnt/a"), read_only=st.booleans()),
        st.builds(
            specs.VolumeMount,
            src=st.sampled_from(["claim", "pvc/claim", "configmap/c", "secret/s", "emptydir/", "emptydir/1Gi"]),
            dst_path=st.just("/mnt/b"),
            read_only=st.booleans(),
        ),
        st.builds(
            specs.DeviceMount, src_path=st.just("/dev/fuse"), dst_path=st.just("/dev/fuse"), permissions=st.just("rwm")
        ),
    ),
    max_size=2,
    unique_by=lambda mount: mount.dst_path,
)


@st.composite
def roles(draw):
    most = draw(st.integers(1, 5000))
    make = agent_role if draw(st.booleans()) else plain_role
    common = {
        "num_replicas": most,
        "min_replicas": draw(st.none() | st.integers(1, most)),
        "max_retries": draw(st.integers(0, 5)),
        "env": draw(
            st.dictionaries(st.sampled_from(["A", "B_1", "WANDB_API_KEY", "NODE_INDEX", "TMPDIR"]), TEXT, max_size=3)
        ),
        "mounts": draw(MOUNTS),
        "port_map": draw(st.dictionaries(st.sampled_from(["c10d", "Tensor Board"]), st.integers(1, 65535), max_size=2)),
        "resource": specs.Resource(
            cpu=draw(st.integers(-1, 64)),
            gpu=draw(st.integers(-1, 8)),
            memMB=draw(st.integers(-1, 1 << 20)),
            devices=draw(st.dictionaries(st.just("rdma/hca"), st.integers(0, 8), max_size=1)),
        ),
        "metadata": draw(st.just({}) | st.just({RoleKey.MEMORY_REQUEST_MB: "4096"})),
    }
    role = make(**common)
    role.args = [*role.args, *draw(st.lists(TEXT, max_size=3))]
    return role


OPTIONS = st.fixed_dictionaries(
    {"flavor": st.sampled_from(FLAVORS), "kube_version": st.sampled_from(versions())},
    optional={
        "namespace": st.just("team-a"),
        "queue": st.just("q"),
        "priority_class": st.just("high"),
        "service_account": st.just("sa"),
        "image_pull_secrets": st.just(["regcred"]),
        "image_pull_policy": st.sampled_from(["Always", "Never"]),
        "node_selector": st.just({"a/b": "c"}),
        "labels": st.just({"cost.example.com/center": "42", "app.kubernetes.io/part-of": "search"}),
        "tolerations": st.just(["k:v:NoExecute:30", "k"]),
        "pod_template": st.just('{"spec": {"containers": [{"name": "main", "tty": true}], "priority": null}}'),
        "ttl_s": st.integers(0, 10**6),
        "deadline_s": st.integers(1, 10**6),
        "shm_size": st.just("16Gi"),
        "compile_cache": st.just("compile-caches"),
        "grace_s": st.integers(31, 600),
        "rdma": st.sampled_from(["true", "rdma/hca:8"]),
        "gang": st.sampled_from(["auto", "auto", "auto", "none", "kueue", "podgroup", "volcano"]),
        "agent": st.sampled_from(["bundled", "image"]),
        "security": st.sampled_from(["baseline", "restricted"]),
        "run_as": st.sampled_from(["image", "5000", "5000:6000"]),
        "suspend": st.booleans(),
        "events": st.booleans(),
        "efa_device_count": st.integers(0, 4),
        "reserved_millicpu": st.integers(0, 500),
    },
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(name=NAMES, app_roles=st.lists(roles(), min_size=1, max_size=3), options=OPTIONS)
def test_every_request_passes_the_strict_schema(name, app_roles, options):
    for index, role in enumerate(app_roles):
        role.name = f"{role.name}{index}"
    app = specs.AppDef(name=name, roles=app_roles)
    before = copy.deepcopy(app)
    try:
        request = build_request(app, options, name="app-b1c2d3e4")
    except SchedulerError as error:
        event(f"refused: {str(error)[:40]}")
        refused = str(error)
    else:
        refused = None
    if refused is not None:
        assert "\n" not in refused, "one line"
        return
    assert app == before, "the caller's AppDef is not changed"
    again = build_request(app, options, name="app-b1c2d3e4")
    assert json.dumps(again.documents) == json.dumps(request.documents), "deterministic"
    assert str(request)
    for document in complete_documents(request, **ADDED):
        validate_strictly(document, options["kube_version"])
        check_create(document)
    assert again.documents == request.documents, "not changed"


@pytest.mark.parametrize("flavor", FLAVORS)
def test_every_object_and_every_pod_has_the_labels_of_the_options_and_of_the_submitter(flavor):
    wanted = {"team": "vision", "muster.torchx/submitter": "anna"}
    request = build(
        agent_role(env={"A_TOKEN": "x"}), plain_role(), flavor=flavor, labels={"team": "vision"}, submitter="anna"
    )
    for document in request.documents:
        assert wanted.items() <= document["metadata"]["labels"].items()
    templates = list(find_pod_templates(request.documents))
    assert len(templates) == 2
    assert all(wanted.items() <= template["metadata"]["labels"].items() for template in templates)
    assert str(request).count("team: vision") == len(request.documents) + (4 if flavor == "jobset" else 2), "dry run"
    own = build(agent_role(), labels={"muster.torchx/submitter": "ci-of-anna"}, submitter="root").parents[0]
    assert own["metadata"]["labels"]["muster.torchx/submitter"] == "ci-of-anna"


@pytest.mark.parametrize(
    ("flavor", "place"),
    [
        ("job", "/apis/batch/v1/namespaces/$(MUSTER_POD_NAMESPACE)/jobs/app-x1-trainer"),
        ("jobset", "/apis/jobset.x-k8s.io/v1alpha2/namespaces/$(MUSTER_POD_NAMESPACE)/jobsets/app-x1"),
    ],
)
def test_events_tell_the_agent_its_object_and_mount_the_token_for_agents_only(flavor, place):
    request = build(agent_role(env={"A_TOKEN": "x"}), plain_role(), flavor=flavor, events=True)
    agents, others = find_pod_templates(request.documents)
    env = {item["name"]: item.get("value") for item in agents["spec"]["containers"][0]["env"]}
    assert env["MUSTER_JOB_OBJECT"] == place
    assert env["MUSTER_ACCOUNT_DIR"] == "/var/run/secrets/kubernetes.io/serviceaccount"
    assert env["MUSTER_SECRET_NAMES"] == "A_TOKEN"
    assert (agents["spec"]["automountServiceAccountToken"], others["spec"]["automountServiceAccountToken"]) == (
        True,
        False,
    )
    two = build(agent_role(), agent_role(name="eval"), flavor=flavor, events=True)
    assert (f"{place} trainer" in str(two)) == (flavor != "job"), "roles that share an object are named"
    without = build(agent_role(), flavor=flavor)
    assert "MUSTER_JOB_OBJECT" not in str(without)
    assert not pod_of(without)["spec"]["automountServiceAccountToken"]


@pytest.mark.parametrize(("user", "label"), [("anna", "anna"), ("CORP\\Anna B.", "CORP-Anna-B"), ("_x@y", "x-y")])
def test_the_submitter_is_the_user_name_as_a_label(monkeypatch, user, label):
    monkeypatch.setattr("getpass.getuser", lambda: user)
    assert find_submitter() == label


def test_a_user_without_a_name_has_no_label(monkeypatch):
    monkeypatch.setattr("getpass.getuser", mock.Mock(side_effect=KeyError("uid not found: 4711")))
    assert find_submitter() == ""


def test_a_time_limit_is_one_of_every_role():
    roles = agent_role(), plain_role()
    jobs = build(*roles, deadline_s=3600).parents
    assert [job["spec"]["activeDeadlineSeconds"] for job in jobs] == [3600, 3600]
    [jobset] = build(*roles, flavor="jobset", deadline_s=3600).parents
    inner = [each["template"]["spec"] for each in jobset["spec"]["replicatedJobs"]]
    assert [spec["activeDeadlineSeconds"] for spec in inner] == [3600, 3600]
    assert all("activeDeadlineSeconds" not in job["spec"] for job in build(*roles).parents)


# -- golden files -----------------------------------------------------------------------------------------------------


def golden_text(request):
    """As printed, without the bundle's bytes and the AppDef, whose encoding depends on the version of TorchX."""
    text = re.sub(r"muster-agent\.zip: <[\d,]+ bytes, sha256 \w{16}>", 'muster-agent.zip: "..."', str(request))
    return re.sub(rf"{re.escape(APPDEF_ANNOTATION)}: .+", f"{APPDEF_ANNOTATION}: ...", text)


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("size", ["fixed", "elastic"])
def test_golden(flavor, size):
    role = agent_role(
        nodes=4,
        least=2 if size == "elastic" else None,
        max_retries=1,
        env={"PRICE": "$5", "HF_TOKEN": "s3cret"},
        resource=specs.Resource(cpu=8, gpu=2, memMB=16384),
    )
    text = golden_text(build(role, flavor=flavor, kube_version="1.31"))
    path = GOLDEN / f"{flavor}-{size}.yaml"
    assert text == path.read_text(), f"to accept the change: write the text to {path}"


def test_golden_gang_of_volcano():
    text = golden_text(build(agent_role(nodes=4), plain_role(), gang="volcano", queue="training"))
    path = GOLDEN / "job-volcano.yaml"
    assert text == path.read_text(), f"to accept the change: write the text to {path}"


# -- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flavor", FLAVORS)
def test_the_size_does_not_depend_on_the_number_of_nodes(flavor):
    def size(nodes):
        request = build(*with_workspace(agent_role(nodes=nodes, least=2)), flavor=flavor, workspaces=FILES)
        return len(str(request)), len(json.dumps(strip_files(request), separators=(",", ":")))

    printed, sent = size(4096)
    assert sent <= 8192
    assert printed <= 8192
    assert abs(size(4096)[1] - size(16)[1]) < 64


FILES = {"workspace-1.tar.gz": b"packed", "workspace-2.tar.gz": b"other"}


def with_workspace(*roles, key="workspace-1.tar.gz"):
    for role in roles:
        role.metadata = {**role.metadata, "muster.kubernetes_workspace": key}
    return roles


def strip_files(request):
    """The documents without the agent and the workspace."""
    return [{**document, "binaryData": None, "data": None} for document in request.documents]


def test_every_object_of_the_largest_allowed_workspace_is_below_the_limit():
    limit = WORKSPACE_LIMIT_BYTES
    request = build(*with_workspace(agent_role()), workspaces={"workspace-1.tar.gz": os.urandom(limit)})
    sizes = {document["kind"]: len(json.dumps(document)) for document in complete_documents(request, **ADDED)}
    assert max(sizes.values()) < 1 << 20  # of an object
    assert sizes["Secret"] > limit
    with pytest.raises(SchedulerError, match=r"700 KiB packed, .* 700 KiB "):
        build(*with_workspace(agent_role()), workspaces={"workspace-1.tar.gz": os.urandom(limit + 1)})


@pytest.mark.parametrize(("size", "qualifier"), [(800 * 1024, "packed"), (80 << 20, "or more")])
def test_a_workspace_that_is_too_large_names_what_is_large_in_it(tmp_path, size, qualifier):
    (tmp_path / "main.py").write_text("pass")
    (tmp_path / "data" / "deep").mkdir(parents=True)
    with (tmp_path / "data" / "deep" / "set.bin").open("wb") as file:
        if qualifier == "packed":
            file.write(os.urandom(size))
        else:
            file.truncate(size)
    parts = rf"; the largest parts are data \({size // 1024} KiB\)"
    with pytest.raises(SchedulerError, match=rf"KiB {qualifier}, .* 700 KiB packed{parts}"):
        pack_workspace(str(tmp_path))


def test_secret_arguments_are_in_the_secret():
    """They stood in the pod template, and in what `dryrun=full` prints."""
    script = [
        "--api_key=a$(x)$$b",
        "--password",
        "hunter2",
        "--lr=0.1",
        "ghp_0123456789abcdefghij",
        "--key=${replica_id}",
    ]
    request = build(agent_role(script=script), dryrun="full")
    args = container_of(request)["args"][-6:]
    references = [f"$(MUSTER_ARGUMENT_{number})" for number in range(3)]
    shown = [f"--api_key={references[0]}", "--password", references[1], "--lr=0.1", references[2]]
    assert args == [*shown, "--key=$(MUSTER_POD_INDEX)"]
    assert "hunter2" not in str(request) + repr(request)
    secret = next(each for each in complete_documents(request, **ADDED) if each["kind"] == "Secret")
    values = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
    # TorchX's own substitution turns $$ into $; Kubernetes changes nothing in what a variable holds
    expected = ["a$(x)$b", "hunter2", "ghp_0123456789abcdefghij"]
    assert [values[f"trainer.MUSTER_ARGUMENT_{number}"] for number in range(3)] == expected
    for number in range(3):
        assert (
            env_of(request)[f"MUSTER_ARGUMENT_{number}"]["secretKeyRef"]["key"] == f"trainer.MUSTER_ARGUMENT_{number}"
        )


def test_a_secret_that_differs_from_node_to_node_is_masked_or_named():
    """The dry run for `kubectl` printed them without a word."""
    script = ["--key=hunter2-${replica_id}", "--password", "hunter3-${replica_id}", "--token=plain"]
    role = agent_role(script=script, env={"MY_TOKEN": "hunter4-${replica_id}", "SEEN": "${replica_id}"})
    assert not re.search(r"hunter\d", str(build(role)))
    text = str(build(role, dryrun="full"))
    note = "# Printed whole, since it differs from node to node and no Secret can hold it: "
    named = [line.removeprefix(note) for line in text.splitlines() if line.startswith(note)]
    assert sorted(named) == ["--key=***", "--password ***", "MY_TOKEN=***"]
    assert text.count("hunter2-") == 1, "kubectl needs it"


def test_variables_that_the_metadata_names_are_in_the_secret():
    env = {"PLAIN": "pa$$$$word", "SEEN": "1"}  # as components escape what must arrive as it is
    request = build(agent_role(env=env, metadata={RoleKey.SECRET_ENV: "PLAIN"}), dryrun="full")
    assert env_of(request)["SEEN"] == "1"
    assert "word" not in str(request).replace("password", "")
    secret = next(each for each in complete_documents(request, **ADDED) if each["kind"] == "Secret")
    assert base64.b64decode(secret["data"]["trainer.PLAIN"]) == b"pa$$word"
    described = decode_app(request.parents[0]).roles[0].env
    assert described == {"PLAIN": "***", "SEEN": "1"}


def test_a_dry_run_is_for_people():
    """It was one line of 227,822 characters; the files are named with their size and digest."""
    request = build(*with_workspace(agent_role()), workspaces=FILES)
    shown = list(yaml.safe_load_all(str(request)))
    packed = base64.b64decode(request.documents[1]["binaryData"]["muster-agent.zip"])
    digest = hashlib.sha256(packed).hexdigest()[:16]
    assert shown[1]["binaryData"] == {"muster-agent.zip": f"<{len(packed):,} bytes, sha256 {digest}>"}
    assert re.fullmatch(r"<6 bytes, sha256 \w{16}>", shown[2]["data"]["workspace-1.tar.gz"])
    text = str(request)
    assert max(map(len, text.splitlines())) <= 160
    assert "-cfg dryrun=full prints" in text
    assert "kubectl create" not in text
    with pytest.raises(ValueError):  # so does the API server
        base64.b64decode(shown[1]["binaryData"]["muster-agent.zip"], validate=True)


def test_the_whole_dry_run_is_what_is_sent_but_for_what_it_names():
    script = ["yes", "1e3", "null", " leading", "multi\nline", "ünï"]
    role = agent_role(env={"WANDB_API_KEY": "hunter2"}, script=script)
    request = build(*with_workspace(role), workspaces=FILES, dryrun="full")
    assert "create -f FILE, or " in str(request)
    shown = list(yaml.safe_load_all(str(request)))
    secret = shown[0].pop("stringData")
    assert shown == json.loads(json.dumps(request.documents))
    assert secret == {"token-trainer": "<token-trainer>", "trainer.WANDB_API_KEY": "<trainer.WANDB_API_KEY>"}
    for document in yaml.safe_load_all(str(request)):
        validate_published(document, versions()[-1])
    sent = complete_documents(request, **ADDED)
    for document in sent:
        added = {key: document["metadata"].pop(key) for key in ("annotations", "namespace")}
        assert added["annotations"].pop("muster.torchx/submission") == "s"
        assert added["namespace"] == "team-a"
        document["metadata"] |= {"annotations": added["annotations"]} if added["annotations"] else {}
    assert sent[0].pop("data").keys() == secret.keys()
    assert sent == json.loads(json.dumps(request.documents))
    assert request.describe_additions() == [
        "the namespace of the context",
        "the values of the Secret",
        "the annotation muster.torchx/submission",
        "ownerReferences to app-x1-trainer",
        "a PodGroup if the cluster has them (gang=auto)",
    ]


def test_one_line_of_the_dry_run_fills_in_its_placeholders(tmp_path):
    text = str(build(agent_role(env={"WANDB_API_KEY": "hunter2"}), dryrun="full"))
    (command,) = (line.partition(": ")[2] for line in text.splitlines() if "sed -i" in line)
    (tmp_path / "FILE").write_text(text)
    (tmp_path / "openssl").write_text("#!/bin/sh\necho r4nd0m\n")
    (tmp_path / "openssl").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "WANDB_API_KEY": "a/b"}
    subprocess.run(["sh", "-c", command], env=env, cwd=tmp_path, check=True)
    secret = next(yaml.safe_load_all((tmp_path / "FILE").read_text()))
    assert secret["stringData"] == {"token-trainer": "r4nd0m", "trainer.WANDB_API_KEY": "a/b"}


def test_the_agent_refuses_a_placeholder():
    from muster.agent.config import read_token
    from muster.agent.errors import UsageError

    with pytest.raises(UsageError, match="MUSTER_TOKEN is <token-trainer>"):
        read_token({"MUSTER_TOKEN": "<token-trainer>"})


def test_a_workspace_travels_in_a_secret_of_its_own():
    roles = [*with_workspace(agent_role()), *with_workspace(plain_role(), key="workspace-2.tar.gz")]
    request = build(*roles, workspaces={**FILES, "workspace-3.tar.gz": b"of another app"})
    documents = {document["metadata"]["name"]: document for document in request.documents}
    assert documents["app-x1-bundle"]["binaryData"].keys() == {"muster-agent.zip"}
    assert documents["app-x1-workspace"]["kind"] == "Secret"
    assert documents["app-x1-workspace"]["data"].keys() == FILES.keys()
    trainer, echo = (documents[f"app-x1-{role}"]["spec"]["template"]["spec"] for role in ("trainer", "echo"))

    def sources(pod):
        return next(volume["projected"]["sources"] for volume in pod["volumes"] if "projected" in volume)

    def secret(key):
        return {"secret": {"name": "app-x1-workspace", "items": [{"key": key, "path": key}]}}

    assert sources(trainer) == [{"configMap": {"name": "app-x1-bundle"}}, secret("workspace-1.tar.gz")]
    assert sources(echo) == [secret("workspace-2.tar.gz")]
    # unpacked by the agent, or by tar
    assert env_of(request)["MUSTER_WORKSPACE"] == "/opt/muster/workspace-1.tar.gz"
    assert trainer["containers"][0]["workingDir"] == env_of(request)["MUSTER_WORKSPACE_DIR"] == "/muster/work"
    assert "initContainers" not in trainer
    unpack = ["tar", "-xzof", "/opt/muster/workspace-2.tar.gz", "-C", "/muster/work"]
    assert echo["initContainers"][0]["command"] == unpack


@pytest.mark.parametrize("name", ["MUSTER_TOKEN", "TORCHX_RANK0_HOST", "MUSTER_POD_INDEX"])
def test_a_variable_that_cannot_be_the_users_is_refused(name):
    with pytest.raises(SchedulerError, match=f"role 'trainer': .* {name} itself"):
        build(agent_role(env={name: "mine"}))


@pytest.mark.parametrize("flavor", FLAVORS)
def test_torchx_job_id_is_a_whole_handle(flavor):
    """It lacked the namespace, and TorchX found no job by it."""
    request = build(agent_role(env={"TORCHX_JOB_ID": "kubernetes://torchx/${app_id}"}), flavor=flavor)
    env = env_of(request)
    assert env["TORCHX_JOB_ID"] == "kubernetes://torchx/$(MUSTER_POD_NAMESPACE):app-x1"
    assert env["MUSTER_POD_NAMESPACE"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}
    names = list(env)
    assert names.index("MUSTER_POD_NAMESPACE") < names.index("TORCHX_JOB_ID")


def test_dollars_reach_the_program_as_they_are():
    role = agent_role(script=["$(HOME)", "a$$b", "${replica_id}", "$VAR"], env={"X": "p$q ${replica_id}"})
    request = build(role)
    args = container_of(request)["args"]
    # TorchX's own substitution turns $$ into $ on every scheduler
    assert args[-4:] == ["$$(HOME)", "a$$b", "$(MUSTER_POD_INDEX)", "$$VAR"]
    assert env_of(request)["X"] == "p$$q $(MUSTER_POD_INDEX)"
    assert container_of(request)["env"][0]["name"] == "MUSTER_POD_INDEX", "a variable can refer only to earlier ones"


def test_the_agent_runs_from_the_bundle_or_from_the_image():
    request = build(agent_role(), agent="image")
    args = container_of(request)["args"]
    assert args[0] == "-c"
    assert "from muster.agent.__main__ import main" in args[1]
    assert args[2] == "--nnodes"
    assert "ConfigMap" not in [document["kind"] for document in request.documents]


def test_a_role_without_our_agent_works_as_in_torchx():
    request = build(plain_role(max_retries=3, min_replicas=1, num_replicas=2))
    spec = request.parents[0]["spec"]
    assert spec["backoffLimit"] == 3
    assert not {"podFailurePolicy", "successPolicy", "backoffLimitPerIndex"} & spec.keys()
    assert [document["kind"] for document in request.documents] == ["Service", "Job"]
    assert "MUSTER_TOKEN" not in env_of(request)


def rendezvous_of(request):
    """What a role's nodes need for rendezvous: (address of rank 0, run id, token or None), by the role's label."""
    documents = {document["kind"]: document for document in complete_documents(request, **ADDED)}
    terms = {}
    for template in find_pod_templates(request.documents):
        label, container = (
            template["metadata"]["labels"]["app.kubernetes.io/component"],
            template["spec"]["containers"][0],
        )
        env = {item["name"]: item for item in container["env"]}
        args = container["args"]
        run_id = args[args.index("--rdzv-id") + 1] if "--rdzv-id" in args else None
        token = env.get("MUSTER_TOKEN")
        token = token and documents["Secret"]["data"][token["valueFrom"]["secretKeyRef"]["key"]]
        terms[label] = (env["TORCHX_RANK0_HOST"]["value"], run_id, token)
    return terms


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize(
    ("roles", "hosts"),
    [
        (
            [agent_role(name="actor"), agent_role(name="critic", nodes=4, least=2), plain_role()],
            {"actor": "actor", "critic": "critic", "echo": "actor"},
        ),
        # TorchX's meaning: replica 0 of role 0
        ([plain_role(name="ps"), agent_role()], {"ps": "ps", "trainer": "trainer"}),
    ],
)
def test_each_agent_role_is_a_job_of_its_own(flavor, roles, hosts):
    terms, place = rendezvous_of(build(*roles, flavor=flavor)), "-0" if flavor == "jobset" else ""
    assert {label: host for label, (host, _, _) in terms.items()} == {
        label: f"app-x1-{host}{place}-0.app-x1" for label, host in hosts.items()
    }
    agents = [label for label in hosts if label not in ("echo", "ps")]
    several = {label: f"app-x1-{label}" for label in agents} if len(agents) > 1 else {"trainer": "app-x1"}
    assert {label: run_id for label, (_, run_id, _) in terms.items() if run_id} == several
    tokens = [token for _, _, token in terms.values() if token]
    assert len({*tokens, base64.b64encode(b"a-token").decode()}) == len(agents) + 1


def test_each_worker_has_a_cpu_where_the_user_gave_no_number():
    request = build(agent_role(metadata={RoleKey.CPU_REQUEST: "8"}))
    assert container_of(request)["resources"]["requests"]["cpu"] == "8"


def test_memory_from_a_default_is_not_a_limit():
    request = build(agent_role(metadata={RoleKey.MEMORY_REQUEST_MB: "4096"}))
    assert container_of(request)["resources"] == {"requests": {"cpu": "2", "memory": "4096Mi"}}
    asked = container_of(build(agent_role()))["resources"]
    assert asked == {"requests": {"cpu": "2", "memory": "2048Mi"}, "limits": {"memory": "2048Mi"}}
    asked = container_of(build(agent_role(), reserved_memmb=48))["resources"]
    assert asked == {"requests": {"cpu": "2", "memory": "2000Mi"}, "limits": {"memory": "2048Mi"}}


def test_devices_by_resource_name():
    role = agent_role(resource=specs.Resource(cpu=1, gpu=4, memMB=1, devices={"amd.com/gpu": 2}))
    limits = container_of(build(role, rdma="rdma/hca:8"))["resources"]["limits"]
    assert limits == {"memory": "1Mi", "amd.com/gpu": "2", "nvidia.com/gpu": "4", "rdma/hca": "8"}
    assert container_of(build(role, rdma="true"))["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


def test_grace_is_longer_than_the_agents_shutdown():
    assert pod_of(build(agent_role()))["spec"]["terminationGracePeriodSeconds"] == 45
    role = agent_role()
    role.args[2:2] = ["--shutdown-timeout", "100"]
    assert pod_of(build(role))["spec"]["terminationGracePeriodSeconds"] == 115


@pytest.mark.parametrize(
    ("cache", "source"),
    [
        ("caches", {"persistentVolumeClaim": {"claimName": "caches"}}),
        ("/var/tmp/caches", {"hostPath": {"path": "/var/tmp/caches", "type": "DirectoryOrCreate"}}),
    ],
)
def test_compile_caches_are_on_a_claim_or_a_folder_of_the_node(cache, source):
    request = build(agent_role(env={"TRITON_CACHE_DIR": "/mine"}), compile_cache=cache)
    assert {"name": "muster-cache", **source} in pod_of(request)["spec"]["volumes"]
    assert {"name": "muster-cache", "mountPath": "/muster/cache"} in container_of(request)["volumeMounts"]
    env = env_of(request)
    assert env["TORCHINDUCTOR_CACHE_DIR"] == "/muster/cache/inductor"
    assert (env["TRITON_CACHE_DIR"], env["CUDA_CACHE_PATH"]) == ("/mine", "/muster/cache/cuda")
    assert not [each for each in pod_of(build(agent_role()))["spec"]["volumes"] if "cache" in each["name"]]
    for bad in ("A_b", "a/b", "/"):
        with pytest.raises(SchedulerError, match="compile_cache"):
            build(agent_role(), compile_cache=bad)


def test_restricted_passes_pod_security():
    pod = pod_of(build(agent_role(), security="restricted"))["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    mount = specs.BindMount(src_path="/data", dst_path="/data")
    with pytest.raises(SchedulerError, match=r"'/data' .* security=restricted"):
        build(agent_role(mounts=[mount]), security="restricted")
    with pytest.raises(SchedulerError, match=r"'/cache' .* security=restricted"):
        build(agent_role(), security="restricted", compile_cache="/cache")


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        ({}, {}),
        ({"security": "restricted"}, {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}),
        ({"run_as": "5000"}, {"runAsUser": 5000, "runAsGroup": 5000, "fsGroup": 5000}),
        ({"run_as": "5000:6000"}, {"runAsUser": 5000, "runAsGroup": 6000, "fsGroup": 6000}),
        ({"run_as": "image"}, {"fsGroup": 1000}),
        ({"run_as": "image", "security": "restricted"}, {"fsGroup": 1000}),
        ({"run_as": "5000", "flavor": "jobset"}, {"runAsUser": 5000, "runAsGroup": 5000, "fsGroup": 5000}),
    ],
)
def test_pods_run_as_another_user_than_root(cfg, expected):
    roles = [*with_workspace(agent_role()), *with_workspace(plain_role(), key="workspace-2.tar.gz")]
    request = build(*roles, workspaces=FILES | {"workspace-2.tar.gz": b"x"}, **cfg)
    spec = pod_of(request)["spec"]
    security = spec["securityContext"]
    assert security == {"seccompProfile": {"type": "RuntimeDefault"}} | (
        {"runAsNonRoot": True} | expected if cfg else {}
    )
    has_home = "HOME" in env_of(request)
    assert has_home is ("runAsUser" in expected), "the image's passwd may lack a number; its own user has a home"
    for document in request.documents:
        validate_strictly(document, "1.36")
    # whoever it is can read agent and workspace, and write where the agent writes
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["muster-bundle"]["projected"]["defaultMode"] & 0o004
    assert "emptyDir" in volumes["muster-work"]
    assert "emptyDir" in volumes["muster-scratch"]


def test_gangs():
    kueue = build(agent_role(nodes=4, least=2), queue="lq", priority_class="high").parents[0]["metadata"]
    assert kueue["labels"]["kueue.x-k8s.io/queue-name"] == "lq"
    names = {"kueue.x-k8s.io/elastic-job", "kueue.x-k8s.io/job-min-parallelism"}
    assert names & kueue["annotations"].keys() == {"kueue.x-k8s.io/elastic-job"}
    fixed = build(agent_role(nodes=4), queue="lq").parents[0]["metadata"]
    assert not names & fixed["annotations"].keys()
    partial = build(agent_role(nodes=4, least=2), queue="lq", kueue_elastic="partial").parents[0]["metadata"]
    assert partial["annotations"]["kueue.x-k8s.io/job-min-parallelism"] == "2"
    assert "kueue.x-k8s.io/elastic-job" not in partial["annotations"]
    native = build(agent_role(nodes=4), gang="podgroup", kube_version="1.37")
    group = next(document for document in native.documents if document["kind"] == "PodGroup")
    assert group["spec"] == {"schedulingPolicy": {"gang": {"minCount": 4}}}
    assert pod_of(native)["spec"]["schedulingGroup"] == {"podGroupName": "app-x1"}
    # Volcano orders jobs by the class of the group, and not by the pods'.
    found = build(agent_role(nodes=4), priority_class="high")
    completed = complete_documents(found, **ADDED, pod_group_version="scheduling.volcano.sh/v1beta1")
    [group] = [document for document in completed if document["kind"] == "PodGroup"]
    assert group["spec"] == {"minMember": 4, "priorityClassName": "high"}
    assert pod_of(found)["spec"]["priorityClassName"] == "high"
    with pytest.raises(SchedulerError, match=r"gang=podgroup needs Kubernetes 1\.36"):
        build(agent_role(nodes=4), gang="podgroup", kube_version="1.35")


@pytest.mark.parametrize(
    ("roles", "cfg", "message"),
    [
        (
            [agent_role(least=1)],
            {"kube_version": "1.30"},
            r"1\.29 or newer is needed .* 1\.31 for elastic jobs; .* 1\.30",
        ),
        ([agent_role(), agent_role()], {}, "role names must differ"),
        ([agent_role(nodes=0)], {}, "num_replicas must be 1 to 16384"),
        ([agent_role(nodes=2, least=3)], {}, r"min_replicas must be from 1 to num_replicas \(2\), not 3"),
        (
            [plain_role(mounts=[specs.VolumeMount(src="nfs/x", dst_path="/x")])],
            {},
            "volume 'nfs/x' is not CLAIM, pvc/NAME, configmap/NAME, secret/NAME or emptydir/",
        ),
        ([plain_role(mounts=[specs.VolumeMount(src="x", dst_path="x")])], {}, "'x' is not an absolute path"),
        ([plain_role(mounts=[specs.VolumeMount(src="x", dst_path="/a/../b")])], {}, "without ':' and '..'"),
        ([plain_role(mounts=[specs.VolumeMount(src="x", dst_path="/muster/work/")])], {}, "is reserved for muster"),
        (
            [plain_role(mounts=[specs.VolumeMount(src="My_Claim", dst_path="/x")])],
            {},
            "is not a Kubernetes object name",
        ),
        (
            [plain_role(mounts=[specs.VolumeMount(src="emptydir/big", dst_path="/x")])],
            {},
            "needs a size such as 10Gi after the slash, or nothing",
        ),
        (
            [plain_role(mounts=[specs.BindMount(src_path="/a/../b", dst_path="/x")])],
            {},
            "path of the host without '..'",
        ),
        (
            [plain_role()],
            {"pod_template": '{"metadata": {"labels": {"app.kubernetes.io/instance": "x"}}}'},
            "labels.app.kubernetes.io/instance cannot be set",
        ),
    ],
)
def test_an_invalid_app_is_one_clear_line(roles, cfg, message):
    with pytest.raises(SchedulerError, match=message) as caught:
        build(*roles, **cfg)
    assert "\n" not in str(caught.value)


# -- metrics ----------------------------------------------------------------------------------------------------------


def serving_role(port="9464", **changes):
    role = agent_role(**changes)
    role.args[2:2] = ["--metrics-port", port]
    return role


@pytest.mark.parametrize("flavor", ["job", "jobset"])
def test_metrics_have_a_named_port_annotations_and_an_address_that_can_be_reached(flavor):
    request = build(serving_role(port_map={"c10d": 29500}), plain_role(), flavor=flavor)
    serving, other = find_pod_templates(request.documents)
    ports = serving["spec"]["containers"][0]["ports"]
    assert ports == [{"containerPort": 29500}, {"containerPort": 9464, "name": "metrics"}]
    annotations = serving["metadata"]["annotations"]
    assert (annotations["prometheus.io/scrape"], annotations["prometheus.io/port"]) == ("true", "9464")
    assert annotations["prometheus.io/path"] == "/metrics"
    assert env_of(request)["MUSTER_METRICS_HOST"] == "::"
    assert "readinessProbe" not in str(request)
    assert "prometheus" not in str(other)
    for document in request.documents:
        validate_strictly(document, "1.31")


@pytest.mark.parametrize("port", [None, "0", "127.0.0.1:9464", "[::1]:9464"])
def test_metrics_that_nobody_can_read_from_outside_have_neither(port):
    request = build(agent_role() if port is None else serving_role(port))
    assert "prometheus" not in str(request)
    assert "MUSTER_METRICS_HOST" not in env_of(request)
    assert "metrics" not in str(container_of(request).get("ports"))
    for option in ("pod_monitor", "readiness"):
        with pytest.raises(SchedulerError, match=f"{option}=true needs a"):
            build(agent_role() if port is None else serving_role(port), **{option: True})


@pytest.mark.parametrize("flavor", ["job", "jobset"])
def test_a_pod_monitor_and_readiness_are_options(flavor):
    request = build(serving_role(), flavor=flavor, pod_monitor=True, readiness=True)
    [monitor] = [document for document in request.documents if document["kind"] == "PodMonitor"]
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod_of(request)["metadata"]["labels"].items()
    for document in request.documents:
        validate_strictly(document, "1.31")
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    [port] = [each for each in container_of(request)["ports"] if each.get("name") == endpoint["port"]]
    probe = container_of(request)["readinessProbe"]["httpGet"]
    assert (probe["path"], probe["port"], port["containerPort"]) == ("/readyz", "metrics", 9464)


def test_a_port_that_the_role_uses_for_something_else_is_refused():
    with pytest.raises(SchedulerError, match=r"--metrics-port 29500 .* port_map"):
        build(serving_role("29500", port_map={"c10d": 29500}))


def test_a_command_is_run_by_a_program_where_its_policy_restarts_it_or_makes_it_wait():
    first = plain_role(port_map={"http": 80})
    late = plain_role(name="late", metadata={RoleKey.POLICY: {"after": "echo", "critical": False}})
    again = plain_role(name="again", metadata={RoleKey.POLICY: {"restart": "on-failure", "max_restarts": 3}})
    documents = build(first, late, again).documents
    jobs = {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in documents if each["kind"] == "Job"
    }
    containers = {name: job["spec"]["template"]["spec"]["containers"][0] for name, job in jobs.items()}
    assert containers[first.name]["command"] == [first.entrypoint]
    for name in ("late", "again"):
        assert containers[name]["command"] == ["python3"]
        assert containers[name]["args"][:2] == ["/opt/muster/muster-agent.zip", "--replica"]
        assert first.entrypoint in containers[name]["args"]
    assert "muster.torchx/not-critical" in jobs["late"]["metadata"]["annotations"]
    rules = jobs["again"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[-1]["onExitCodes"]["values"] == [0, 137, 143]
    assert (jobs["again"]["spec"]["backoffLimit"], jobs["late"]["spec"]["backoffLimit"]) == (3, 0)


def test_a_jobset_has_no_policies():
    late = plain_role(name="late", metadata={RoleKey.POLICY: {"critical": False}})
    with pytest.raises(SchedulerError, match="flavor=jobset: role 'late' has a policy, which only flavor=job"):
        build(plain_role(), late, flavor="jobset", kube_version="1.31")
