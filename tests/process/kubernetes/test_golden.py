"""Today's code serves the jobs that version 19df633 left in a cluster; see tests/golden."""

import subprocess
import sys

import golden_state
import pytest
from torchx.runner import get_runner
from torchx.specs import AppState, BindMount, Resource, RetryPolicy, Role, VolumeMount

pytestmark = pytest.mark.torchx

CAUSE = "ValueError: bad batch 17"
JOBSET, VOLCANO = "jobset.x-k8s.io/v1alpha2", "batch.volcano.sh/v1alpha1"


@pytest.fixture
def runner(cluster):
    cluster.kinds |= {JOBSET: ["jobsets"], VOLCANO: ["jobs"], "bus.volcano.sh/v1alpha1": ["commands"]}
    with get_runner() as made:
        yield made


def handle(app_id):
    return f"kubernetes://torchx/{app_id}"


def trainer(nodes=2, **more):
    args = ["-m", "muster.agent", "--nnodes", str(nodes), "--nproc-per-node", "1", "--rank0-env", "${rank0_env}"]
    args += ["--node-rank", "${replica_id}", "--rdzv-id", "${app_id}", "train.py", "$HOME", "a b"]
    resource = Resource(cpu=2, gpu=1, memMB=1024, capabilities={"node.kubernetes.io/instance-type": "big"})
    fields = {"name": "trainer", "image": "registry/image:1", "entrypoint": "python3", "args": args}
    fields |= {"env": {"LR": "0.1", "HF_TOKEN": "***"}, "num_replicas": nodes, "max_retries": 3, "resource": resource}
    fields["metadata"] = {"muster.kubernetes_workspace": WORKSPACE}
    return Role(**(fields | more))


METADATA = {"team": "vision"}
WORKSPACE = "workspace-28b2b13ad02e.tar.gz"
STATES = {
    "running": AppState.RUNNING,
    "elastic": AppState.RUNNING,
    "succeeded": AppState.SUCCEEDED,
    "failed": AppState.FAILED,
    "cancelled": AppState.CANCELLED,
    "jobset": AppState.SUBMITTED,
    "volcano": AppState.PENDING,
    "nightly": AppState.RUNNING,
}


def test_status(cluster, runner):
    found = {name: runner.status(handle(golden_state.load(cluster, name))).state for name in STATES}
    assert found == STATES


def test_status_of_each_replica(cluster, runner):
    status = runner.status(handle(golden_state.load(cluster, "running")))
    assert status.num_restarts == 1  # node 0's first pod was preempted
    assert {role.role: [(each.id, each.state) for each in role.replicas] for role in status.roles} == {
        "trainer": [(0, AppState.RUNNING), (1, AppState.RUNNING)],
        "echo": [(0, AppState.RUNNING)],
    }


def test_list(cluster, runner):
    for name in STATES:
        golden_state.load(cluster, name)
    found = {app.app_id: app.state for app in runner._scheduler("kubernetes").list()}
    not_ended = (AppState.PENDING, AppState.RUNNING)  # `list` does not read pods, which show which of them it is
    expected = {f"team:{name}-golden": state for name, state in STATES.items()}
    assert found.keys() == expected.keys()
    assert all(
        found[app] == state or (found[app] in not_ended and state in not_ended) for app, state in expected.items()
    )


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        (
            "running",
            [
                trainer(
                    mounts=[
                        BindMount(src_path="/data", dst_path="/data", read_only=True),
                        VolumeMount(src="claim", dst_path="/scratch"),
                    ]
                ),
                Role(
                    name="echo",
                    image="registry/image:1",
                    entrypoint="echo",
                    args=["hello"],
                    resource=Resource(cpu=1, gpu=0, memMB=128),
                ),
            ],
        ),
        ("elastic", [trainer(nodes=4, min_replicas=2)]),
        ("succeeded", [trainer()]),
        ("jobset", [trainer()]),
        ("volcano", [trainer(nodes=4, min_replicas=2)]),
    ],
)
def test_describe_gives_the_app_that_was_submitted(cluster, runner, name, roles):
    app_id = golden_state.load(cluster, name)
    assert runner.describe(handle(app_id)).roles == roles
    response = runner._scheduler("kubernetes").describe(app_id)
    assert getattr(response, "metadata", METADATA) == METADATA  # TorchX 0.7 has no such field


def test_describe_of_an_app_submitted_with_torchx_nightly(cluster, runner):
    (role,) = runner.describe(handle(golden_state.load(cluster, "nightly"))).roles
    assert (role.name, role.num_replicas, role.env) == ("trainer", 2, {"LR": "0.1", "HF_TOKEN": "***"})
    # TorchX 0.7 has no ROLE
    assert role.retry_policy == RetryPolicy.__members__.get("ROLE", RetryPolicy.APPLICATION)


def test_log(cluster, runner):
    app_id = golden_state.load(cluster, "running")
    cluster.write_log({"metadata": {"name": "running-golden-trainer-0-p5"}}, "first pod\n", 1)
    cluster.write_log({"metadata": {"name": "running-golden-trainer-0-p12"}}, "second pod\n", 2)
    assert list(runner.log_lines(handle(app_id), "trainer", 0)) == ["first pod\n", "second pod\n"]


def test_cancel(cluster, runner):
    app_id = golden_state.load(cluster, "running")
    runner.cancel(handle(app_id))
    assert runner.status(handle(app_id)).state == AppState.CANCELLED
    assert [job["spec"]["activeDeadlineSeconds"] for job in cluster.find("jobs")] == [1, 1]


def test_cancel_of_a_jobset(cluster, runner):
    app_id = golden_state.load(cluster, "jobset")
    runner.cancel(handle(app_id))
    assert cluster.find("jobsets")[0]["spec"]["suspend"] is True
    assert runner.status(handle(app_id)).state == AppState.CANCELLED


def test_cancel_of_a_volcano_job(cluster, runner):
    app_id = golden_state.load(cluster, "volcano")
    runner.cancel(handle(app_id))
    (command,) = cluster.find("commands")
    assert (command["action"], command["target"]["name"]) == ("AbortJob", "volcano-golden")


@pytest.mark.parametrize(("name", "sizes"), [("elastic", [3]), ("volcano", [1, 2])])
def test_resize(cluster, runner, name, sizes):
    app_id = golden_state.load(cluster, name)
    command = [sys.executable, "-m", "muster", "resize", handle(app_id), "3"]
    subprocess.run(command, check=True, timeout=60)
    (job,) = cluster.find("jobs")
    spec = job["spec"]
    found = [task["replicas"] for task in spec["tasks"]] if name == "volcano" else [spec["parallelism"]]
    assert found == sizes
    last = runner.status(handle(app_id)).roles[0].replicas[-1]
    assert (last.id, last.state) == (3, AppState.CANCELLED), "what the resize has ended does not wait"


def test_resize_of_a_fixed_size_is_refused(cluster, runner):
    app_id = golden_state.load(cluster, "running")
    command = [sys.executable, "-m", "muster", "resize", handle(app_id), "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "has a fixed number of nodes" in done.stderr


def test_delete_leaves_nothing(cluster, runner):
    apps = [golden_state.load(cluster, name) for name in STATES]
    while apps:
        app_id = apps.pop()
        runner._scheduler("kubernetes").delete(app_id)
        assert runner.status(handle(app_id)) is None
        assert all(runner.status(handle(other)) for other in apps)
    assert [plural for _, _, plural, _ in cluster.objects if plural != "events"] == []


def test_a_failed_job_names_its_root_cause(cluster, runner):
    failed = runner.status(handle(golden_state.load(cluster, "failed")))
    assert CAUSE in failed.msg
    assert CAUSE in failed.structured_error_msg


@pytest.mark.parametrize(
    ("job", "code", "times", "expected"),
    [
        ("failed", 1, 1, "rank 1 on node 1 (node-a) exited with code 1 (ValueError: bad batch 17); "),
        ("hung", 1, 1, "rank 0 on node 0 (node-a) used no CPU time and wrote no line for 1 s (--hang-timeout); "),
        ("oom", 1, 1, "rank 1 on node 0 (node-a) was ended by SIGKILL; "),
        # every time but the last, another pod replaces it: 3 retries, and 2 nodes more than the minimum
        ("node-gone", 69, 6, "only 1 of at least 2 nodes were there within 2 s"),
    ],
)
def test_the_reports_of_its_agents_are_shown(cluster, runner, job, code, times, expected):
    app_id = golden_state.load(cluster, "elastic")
    for _ in range(times):
        cluster.end_pod(cluster.find_pod("elastic-golden-trainer", 1), code, golden_state.last_words(job))
    assert expected in runner.status(handle(app_id)).msg
