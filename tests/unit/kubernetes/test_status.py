"""The status of an app: tables of pods and parents, no cluster."""

import json

import pytest
from doubles.samples import write_report
from torchx import specs
from torchx.specs.api import AppState, AppStatus

from muster._shared.records import replace
from muster.schedulers.adapter.status import build_status
from muster.schedulers.kubernetes.kube import APPDEF_ANNOTATION, CANCEL_ANNOTATION
from muster.schedulers.kubernetes.manifests.bundles import encode_app
from muster.schedulers.kubernetes.running_apps.app import AppRef
from muster.schedulers.kubernetes.running_apps.cancelling import _build_record
from muster.schedulers.kubernetes.running_apps.pod_status import explain_event, find_latest_pods, read_pod
from muster.schedulers.kubernetes.running_apps.status import Observation, build_facts, find_submitted_s
from muster.schedulers.wording.reasons import Code, Reason, identify

NODES = 4
COMPONENT = "app.kubernetes.io/component"


def job(*conditions, annotations=None, role="trainer", status=None, first=True):
    app = specs.AppDef(name="app", roles=[specs.Role(name=role, image="i", num_replicas=NODES)])
    own = {APPDEF_ANNOTATION: encode_app(app)} if first else {}
    listed = [{"type": kind, "status": "True", "reason": reason, "message": "m"} for kind, reason in conditions]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"app-x1-{role}", "annotations": {**own, **(annotations or {})}, "labels": {}, "uid": "u"},
        "spec": {},
        "status": {"active": NODES, "conditions": listed} if status is None else status,
    }


def pod(index, phase="Running", *, created="2026-01-01T00:00:00Z", name=None, **status):
    metadata = status.pop("metadata", {})
    container = {"name": "main", "resources": {"limits": {"memory": "2Gi"}}}
    return {
        "metadata": {
            "name": name or f"app-x1-trainer-{index}-abcde",
            "uid": name or f"uid-{index}-{created}",
            "creationTimestamp": created,
            "labels": {
                COMPONENT: "trainer",
                "batch.kubernetes.io/job-completion-index": str(index),
            },
            **metadata,
        },
        "spec": {"nodeName": "node-a", "containers": [container]},
        "status": {"phase": phase, **status},
    }


def waiting(reason, message=""):
    return [{"name": "main", "image": "img:1", "state": {"waiting": {"reason": reason, "message": message}}}]


def terminated(code, *, reason="Error", message=""):
    ended = {"exitCode": code, "reason": reason, "message": message, "finishedAt": "2026-01-01T00:00:09Z"}
    return [{"name": "main", "state": {"terminated": ended}}]


def unscheduled(message, reason="Unschedulable"):
    return [{"type": "PodScheduled", "status": "False", "reason": reason, "message": message}]


def find(parents, pods, *, warnings=(), **more):
    """`warnings`: "REASON: MESSAGE" by name."""
    facts = [read_pod(item) for item in pods]
    events = {name: explain_event(*text.split(": ", 1)) for name, text in dict(warnings).items()}
    return build_facts("ns:app-x1", Observation(parents=parents, pods=facts, warnings=events, **more))


def describe(parents, pods, **more):
    return build_status(find(parents, pods, **more))


def list_codes(parents, pods, **more):
    return [each.code for each in find(parents, pods, **more).reasons]


def list_waits(parents, pods, **more):
    return tuple(map(identify, find(parents, pods, **more).reasons))


SCRATCH = {"name": "muster-scratch", "emptyDir": {}}, {"name": "muster-scratch", "mountPath": "/muster/scratch"}
IN_PODS = (
    "in the pods, and lost with them: `muster log` prints them; --env MUSTER_LOG_DIR=FOLDER, on a volume, keeps them"
)


@pytest.mark.parametrize(
    ("log_dir", "volume", "flags", "logs"),
    [
        ("/muster/scratch/logs", {}, [], IN_PODS),
        ("/tmp/logs", {"persistentVolumeClaim": {"claimName": "runs"}}, [], IN_PODS),
        ("/data/logs", {"persistentVolumeClaim": {"claimName": "runs"}}, [], "/data/logs/app-x1 on volume runs"),
        ("/data/logs", {"nfs": {}}, [], "/data/logs/app-x1 on volume data"),
        ("/data/logs", {"emptyDir": {}}, [], IN_PODS),
        ("/data/logs", {"configMap": {}}, [], IN_PODS),
        ("/muster/scratch/logs", {"nfs": {}}, ["--log-dir", "/data/x"], "/data/x/app-x1 on volume data"),
        ("", {}, [], ""),
    ],
)
def test_where_the_logs_are(log_dir, volume, flags, logs):
    """`muster status` of every other scheduler said it."""
    item = pod(0)
    given = [{"name": "data", **volume}], [{"name": "data", "mountPath": "/data"}]
    item["spec"]["volumes"], mounts = ([*each, own] for each, own in zip(given, SCRATCH, strict=True))
    agent = ["-m", "muster.agent", "--rdzv-id", "app-x1", *flags, "main.py"]
    env = [{"name": "MUSTER_LOG_DIR", "value": log_dir}] if log_dir else []
    item["spec"]["containers"][0].update(command=["python3"], args=agent, env=env, volumeMounts=mounts)
    assert build_facts("ns:app-x1", Observation(parents=[job()], pods=[read_pod(item)])).logs == logs


def build_pod(log_dir):
    """A pod with the report of its job."""
    failure = {"log_path": f"{log_dir}/app-x1/stderr.log", "error_file": f"{log_dir}/app-x1/error.json"}
    report = write_report("why", {"host": "h", "global_rank": 0, "exit_code": 1, "time_s": 1.0, **failure})
    item = pod(0, "Failed", containerStatuses=terminated(1, message=report))
    claim = {"name": "data", "persistentVolumeClaim": {"claimName": "runs"}}
    item["spec"]["volumes"] = [claim, SCRATCH[0]]
    item["spec"]["containers"][0].update(
        command=["python3"],
        args=["-m", "muster.agent", "--rdzv-id", "app-x1", "main.py"],
        env=[{"name": "MUSTER_LOG_DIR", "value": log_dir}],
        volumeMounts=[{"name": "data", "mountPath": "/data"}, SCRATCH[1]],
    )
    return item


@pytest.mark.parametrize(
    ("log_dir", "is_kept"), [("/data/logs", True), ("/muster/scratch/logs", False), ("/tmp/logs", False)]
)
def test_paths_of_files_that_ended_with_their_pods_are_not_told(log_dir, is_kept):
    """Programs got the paths of files in pods that are gone."""
    facts = build_facts("ns:app-x1", Observation(parents=[job(FAILED_INDEX)], pods=[read_pod(build_pod(log_dir))]))
    told = str(facts.reports)
    assert ("app-x1/stderr.log" in told, "app-x1/error.json" in told) == (is_kept, is_kept)


REPORT = write_report(
    "rank 3 on node 1 (app-x1-trainer-1) exited with code 1 (ValueError: bad batch); why it ended",
    {
        "host": "app-x1-trainer-1",
        "node": 1,
        "node_index": 1,
        "global_rank": 3,
        "exit_code": 1,
        "exception": "ValueError: bad batch",
        "traceback": "Traceback ...",
        "time_s": 1767225600.5,
    },
    run_id="app-x1",
)


@pytest.mark.parametrize(
    ("parents", "pods", "state"),
    [
        ([job(status={})], [], AppState.SUBMITTED),
        ([job()], [pod(0, "Pending")], AppState.PENDING),
        ([job()], [pod(0), pod(1, "Pending")], AppState.RUNNING),
        ([job(("Complete", ""))], [pod(0, "Succeeded")], AppState.SUCCEEDED),
        ([job(("Failed", "PodFailurePolicy"))], [pod(0, "Failed")], AppState.FAILED),
        ([job(("FailureTarget", "PodFailurePolicy"))], [pod(0)], AppState.FAILED),
        ([job(("Failed", "DeadlineExceeded"), annotations={CANCEL_ANNOTATION: "true"})], [], AppState.CANCELLED),
        ([job(annotations={CANCEL_ANNOTATION: "true"})], [pod(0)], AppState.RUNNING),
        ([job(annotations={CANCEL_ANNOTATION: "true"})], [], AppState.PENDING),
        ([job()], [pod(0, "Succeeded"), pod(1, "Succeeded")], AppState.RUNNING),
        ([job(("Complete", ""), annotations={CANCEL_ANNOTATION: "true"})], [], AppState.SUCCEEDED),
        ([job(("Complete", "")), job(first=False, role="b")], [pod(0)], AppState.RUNNING),
        ([job(), job(("Failed", "BackoffLimitExceeded"), first=False, role="b")], [pod(0)], AppState.FAILED),
    ],
)
def test_the_state(parents, pods, state):
    assert describe(parents, pods).state is state


NO_HOST = "dial tcp: lookup registry.invalid on 10.96.0.10:53: no such host"
PULL = (
    'ErrImagePull: rpc error: code = Unknown desc = failed to pull and unpack image "img:1": failed to resolve '
    f'reference "img:1": failed to do request: Head "https://registry.invalid/v2/img/manifests/1": {NO_HOST}'
)
CANNOT_START = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: "
    "unable to start container process: error during container init: "
    'exec: "python3": executable file not found in $PATH'
)


GPUS = "Insufficient nvidia.com/gpu"
LACKS = Reason(code=Code.UNSCHEDULABLE, lacks=(GPUS,), counts=(3,), total=3, what=GPUS)
EVICTION = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "by drain"}
TAINTED = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
NOT_PULLED = Reason(code=Code.IMAGE_NOT_PULLED, image="img:1")


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [
        (unscheduled("0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3"), LACKS),
        (
            unscheduled("0/3 nodes are available: 1 node(s) had untolerated taint {a: b}, 2 Insufficient cpu."),
            Reason(
                code=Code.UNSCHEDULABLE,
                lacks=("node(s) had untolerated taint {a: b}", "Insufficient cpu"),
                counts=(1, 2),
                total=3,
                what="Insufficient cpu, node(s) had untolerated taint {a: b}",
            ),
        ),
        (unscheduled("no claim"), Reason(code=Code.NOT_SCHEDULED, text="no claim", what="no claim")),
        (unscheduled("", "SchedulingGated"), Reason(code=Code.GATED)),
    ],
)
def test_why_a_pod_has_no_node(conditions, reason):
    assert read_pod(pod(0, "Pending", conditions=conditions)).reason == reason


@pytest.mark.parametrize(
    ("word", "message", "reason"),
    [
        ("ImagePullBackOff", 'Back-off pulling image "img:1"', NOT_PULLED),
        ("ImagePullBackOff", f'Back-off pulling image "img:1": {PULL}', replace(NOT_PULLED, text=NO_HOST)),
        ("ErrImagePull", PULL.partition(": ")[2], replace(NOT_PULLED, text=NO_HOST)),
        ("ErrImagePull", "", NOT_PULLED),
        ("InvalidImageName", "bad format", replace(NOT_PULLED, word="InvalidImageName", text="bad format")),
        (
            "CreateContainerConfigError",
            'secret "s" not found',
            Reason(
                code=Code.SCHEDULER_SAID,
                word="CreateContainerConfigError",
                text='secret "s" not found',
                what='CreateContainerConfigError: secret "s" not found',
            ),
        ),
        ("ContainerCreating", "", None),
    ],
)
def test_why_a_container_waits(word, message, reason):
    assert read_pod(pod(0, "Pending", containerStatuses=waiting(word, message))).reason == reason


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"containerStatuses": terminated(137, reason="OOMKilled")}, Reason(code=Code.OUT_OF_MEMORY, limit="2Gi")),
        ({"containerStatuses": terminated(143)}, Reason(code=Code.EXITED, exit_code=143)),
        ({"containerStatuses": terminated(1)}, Reason(code=Code.EXITED, exit_code=1)),
        (
            {"containerStatuses": terminated(128, reason="StartError", message=CANNOT_START)},
            Reason(code=Code.IMAGE_LACKS_COMMAND, image="img:1", program="python3", is_agent=True),
        ),
        (
            {"containerStatuses": terminated(128, reason="StartError", message="no space")},
            Reason(code=Code.COULD_NOT_START, text="no space"),
        ),
        (
            {"conditions": [EVICTION]},
            Reason(code=Code.NODE_DRAINED, word="EvictionByEvictionAPI", text="by drain"),
        ),
        ({"reason": "Evicted", "message": "low on memory"}, Reason(code=Code.NODE_EVICTED, text="low on memory")),
        (
            {"initContainerStatuses": [{"state": {"terminated": {"exitCode": 127, "message": "tar?"}}}]},
            Reason(code=Code.WORKSPACE_NOT_UNPACKED, exit_code=127, text="tar?"),
        ),
        ({}, Reason(code=Code.ENDED_WITHOUT_CODE, text="ended without an exit code")),
    ],
)
def test_why_a_pod_has_ended(status, reason):
    item = pod(0, "Failed", **status)
    item["spec"]["containers"][0].update(image="img:1", command=["python3"], args=["-m", "muster.agent", "main.py"])
    assert read_pod(item).reason == reason


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [([TAINTED], Reason(code=Code.NODE_SILENT, host="node-a")), ([], Reason(code=Code.TERMINATING))],
)
def test_why_a_pod_that_is_deleted_is_still_there(conditions, reason):
    metadata = {"deletionTimestamp": "2026-01-01T00:01:00Z"}
    assert read_pod(pod(0, metadata=metadata, conditions=conditions)).reason == reason


def test_what_changes_by_itself_is_one_reason():
    """An image that could not be pulled was told anew every 10 s, as were pods that a quota refused."""
    back_off, no_host = waiting("ImagePullBackOff", 'Back-off pulling image "img:1"'), waiting("ErrImagePull", PULL)
    stuck = [unscheduled(f"0/{total} nodes are available: {total} Insufficient cpu.") for total in (1, 2)]
    told = set()
    for states in ((back_off, no_host), (no_host, back_off), (no_host, no_host), (back_off, back_off)):
        pods = [pod(index, "Pending", containerStatuses=each) for index, each in enumerate(states)]
        [reason] = find([job()], pods).reasons
        assert reason.causes[0].text == (NO_HOST if no_host in states else ""), "some lack the cause"
        told.add(identify(reason))
    assert len(told) == 1
    assert len({list_waits([job()], [pod(0, "Pending", conditions=each)]) for each in stuck}) == 1
    short = job() | {"spec": {"parallelism": 2, "completions": 2}}
    refused = [{"app-x1-trainer": f'FailedCreate: pods "{name}" is forbidden: exceeded quota'} for name in "ab"]
    refused.append(refused[0] | {"app-x1-trainer-0-abcde": "Unhealthy: x"})  # a pod that exists
    assert len({list_waits([short], [pod(0)], warnings=each) for each in refused}) == 1


def test_a_message_that_names_its_pod_is_the_same_for_all_pods():
    """Of 64 pods each had a reason of its own, and the line was as long."""
    named = 'container has runAsNonRoot and image will run as root (pod: "{0}_ns({0})", container: main)'
    pods = []
    for index in range(2):
        name = f"app-x1-trainer-{index}-p"
        states = waiting("CreateContainerConfigError", named.format(name))
        pods.append(pod(index, "Pending", name=name, containerStatuses=states))
    [reason] = find([job()], pods).reasons
    assert (reason.code, reason.count, reason.causes[0].word) == (Code.PODS_WAIT, 2, "CreateContainerConfigError")


def test_a_message_of_the_scheduler_is_shown_as_it_is_although_it_names_its_pod():
    lack = 'persistentvolumeclaim "app-x1-trainer-0-abcde-data" not found'
    [reason] = find([job()], [pod(0, "Pending", conditions=unscheduled(f"0/3 nodes are available: {lack}."))]).reasons
    assert reason.causes[0].lacks == (lack,)


def test_pods_that_failed_for_different_reasons_are_not_one_group():
    ends = [("NodeAffinity", "Pod was rejected"), ("UnexpectedAdmissionError", "Allocate failed: no GPU")]
    pods = [pod(index, "Failed", reason=word, message=text) for index, (word, text) in enumerate(ends)]
    found = find([job(("Failed", "BackoffLimitExceeded"))], pods).reasons
    assert sorted(each.causes[0].text for each in found if each.code is Code.PODS_FAILED) == [
        "Allocate failed: no GPU",
        "Pod was rejected",
    ]


@pytest.mark.parametrize(
    "told",
    [
        [  # the controller attaches it, the kubelet waits for that
            {"warnings": {"app-x1-trainer-0-abcde": f"{event}: volume data"}}
            for event in ("FailedAttachVolume", "FailedMount")
        ],
        [
            {"queue": Reason(code=Code.QUEUE, queue="q", text=f"{count} more needed", what=" more needed")}
            for count in (1, 12)
        ],
    ],
)
def test_reasons_that_follow_each_other_are_one(told):
    item = pod(0, "Pending", containerStatuses=waiting("ContainerCreating"))
    assert len({list_waits([job()], [item], **each) for each in told}) == 1


def test_a_sidecar_that_begins_again_is_one_reason():
    event = {"app-x1-trainer-0-abcde": "BackOff: Back-off restarting failed container sidecar"}
    main = waiting("PodInitializing")
    loops = [{"name": "sidecar", **waiting("CrashLoopBackOff", "back-off 20s restarting")[0]}, *main]
    waits = [
        list_waits([job()], [pod(0, "Pending", initContainerStatuses=each, containerStatuses=main)], warnings=event)
        for each in (loops, [])
    ]
    assert waits[0] == waits[1]


def test_only_the_newest_pod_of_an_index_counts():
    old = pod(1, "Failed", created="2026-01-01T00:00:00Z", containerStatuses=terminated(143))
    new = pod(1, created="2026-01-01T00:01:00Z")
    status = describe([job()], [new, pod(0), old])
    assert status.roles_statuses[0].replicas[1].state is AppState.RUNNING
    assert status.num_restarts == 1
    assert status.msg == "2 of 4 nodes run"
    assert len(find_latest_pods([read_pod(item) for item in (new, old)])) == 1


def test_events_explain_what_pods_do_not():
    pods = [pod(0, "Pending", name="app-x1-trainer-0-q", containerStatuses=waiting("ContainerCreating"))]
    [reason] = find([job()], pods, warnings={"app-x1-trainer-0-q": "FailedMount: no such claim"}).reasons
    assert (reason.code, reason.causes[0].word, reason.causes[0].text) == (
        *(Code.PODS_WAIT, "FailedMount"),
        "no such claim",
    )
    violates = 'FailedCreate: is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'
    for event, code in (
        ("FailedCreate: exceeded quota", Code.QUOTA_EXCEEDED),
        (violates, Code.SECURITY_REFUSED),
        ("FailedCreate: x", Code.SCHEDULER_SAID),
    ):
        [reason] = find([job(status={"active": 0})], [], warnings={"app-x1-trainer": event}).reasons
        assert (reason.code, reason.causes[0].code) == (Code.NO_PODS, code)


def test_pods_that_wait_without_a_reason_are_counted():
    """The status had no reason at all: only since when."""
    some = job() | {"spec": {"completions": 2, "parallelism": 2}}
    some["metadata"]["namespace"] = "team"
    free, placed = pod(0, "Pending"), pod(1, "Pending")
    free["spec"].pop("nodeName")
    kubectl = "kubectl -n team describe"
    told = Reason(code=Code.PODS_UNEXPLAINED, count=2, total=2, by=f"{kubectl} pod app-x1-trainer-0-abcde")
    assert find([some], [free, placed]).reasons == (told,)
    stuck = pod(1, "Pending", conditions=unscheduled("0/1 nodes are available: 1 Insufficient cpu."))
    assert list_codes([some], [free, stuck]) == [Code.PODS_WAIT, Code.PODS_UNEXPLAINED]
    queue = Reason(code=Code.QUEUE, queue="q")
    assert find([some], [free], queue=queue).reasons == (queue,)
    assert find([some], []).reasons == (Reason(code=Code.JOB_UNEXPLAINED, by=f"{kubectl} job app-x1-trainer"),)


def test_a_job_that_waits_again_says_that_it_ran_before():
    """All its pods were deleted: it was PENDING since its submission, as if it had never run."""
    some = job()
    some["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    waits = pod(0, "Pending", created="2026-01-01T00:07:00Z")
    waits["metadata"]["annotations"] = {"batch.kubernetes.io/job-index-ignored-failure-count": "1"}
    for pods, more in (([waits], {}), ([], {"last_end": "2026-01-01T00:07:00Z"})):
        facts = build_facts("ns:app-x1", Observation(parents=[some], pods=[read_pod(item) for item in pods], **more))
        assert facts.reasons[0] == Reason(code=Code.RAN_BEFORE)
        assert facts.since_s - facts.submitted_s == 420


def test_pods_that_were_never_created_are_counted():
    some = job()
    some["spec"]["parallelism"] = 3
    event = "FailedCreate: exceeded quota"
    [reason] = find(
        [some], [pod(0)], warnings={"app-x1-trainer": event, "app-x1-trainer-0-abcde": "Unhealthy: x"}
    ).reasons
    assert (reason.code, reason.count, reason.causes[0].code) == (Code.PODS_MISSING, 2, Code.QUOTA_EXCEEDED)
    assert list_codes([some], [pod(0), pod(1), pod(2)], warnings={"app-x1-trainer": event}) == []
    ended = job(("Complete", "r"), status=None)
    ended["spec"]["parallelism"] = 3
    assert list_codes([ended], [pod(0, "Succeeded")], warnings={"app-x1-trainer": event}) == []


def test_a_failed_job_shows_the_exception_in_both_places_of_torchx():
    failed = [pod(index, "Failed", containerStatuses=terminated(1, message=REPORT)) for index in range(2)]
    status = describe([job(("Failed", "PodFailurePolicy"))], failed)
    assert "(ValueError: bad batch)" in status.msg
    error = json.loads(status.structured_error_msg)
    assert set(error) == {"message"}, "its report is 3.5 KB, which TorchX prints in one line"
    assert error["message"]["extraInfo"]["py_callstack"] == "Traceback ..."
    shown = AppStatus(
        status.state, msg=status.msg, structured_error_msg=status.structured_error_msg, roles=status.roles_statuses
    )
    assert "ValueError: bad batch" in shown.format()
    assert "ValueError: bad batch" in repr(shown)
    assert [replica.state for replica in status.roles_statuses[0].replicas] == [AppState.FAILED] * 2 + [
        AppState.CANCELLED
    ] * 2


def test_the_reason_of_the_end_is_shown_while_other_pods_still_end():
    lost = pod(0, "Failed", containerStatuses=terminated(143))
    terminating = pod(1, metadata={"deletionTimestamp": "2026-01-01T00:01:00Z"})
    facts = find([job(("FailureTarget", "FailedIndexes"))], [lost, terminating])
    assert [each.code for each in facts.reasons] == [Code.NO_RETRY_LEFT, Code.PODS_FAILED, Code.PODS_RUN]
    assert facts.restarts == 0, "no pod was replaced"
    both = job(("FailureTarget", "FailedIndexes"), ("Failed", "FailedIndexes"))
    assert list_codes([both], [lost]) == [Code.NO_RETRY_LEFT, Code.PODS_FAILED]


KILLED = terminated(137)
FAILED_INDEX = ("Failed", "FailedIndexes")


@pytest.mark.parametrize(
    ("pods", "nodes", "names"),
    [
        (
            [pod(index, "Failed", containerStatuses=KILLED) for index in range(2)],
            (0, 1),
            ("app-x1-trainer-0-abcde", "app-x1-trainer-1-abcde"),
        ),
        (
            [
                pod(0, "Failed", name="a", containerStatuses=KILLED),
                pod(0, "Failed", name="b", containerStatuses=KILLED, metadata={"labels": {COMPONENT: "other"}}),
            ],
            (),
            ("b", "a"),
        ),
    ],
)
def test_pods_that_failed_are_named(pods, nodes, names):
    """It was "1/2 Failed: was ended by SIGKILL": no node, and it read as attempt 1 of 2."""
    some = job(FAILED_INDEX) | {"spec": {"completions": 2}}
    why, reason = find([some], pods).reasons
    assert (why.code, reason.code, reason.nodes, reason.pods) == (Code.NO_RETRY_LEFT, Code.PODS_FAILED, nodes, names)
    assert reason.causes == (Reason(code=Code.EXITED, exit_code=137),)


def test_a_pod_that_only_repeats_the_report_is_left_out():
    """Beside "exited with code 3" it said "1/2 Failed: exited with code 1": the code of the agent."""
    some = job(("Failed", "PodFailurePolicy")) | {"spec": {"completions": 2}}
    told = pod(0, "Failed", containerStatuses=terminated(1, message=REPORT))
    mute = pod(1, "Failed", containerStatuses=terminated(1))
    assert list_codes([some], [told]) == list_codes([some], [told, mute]) == [Code.JOB_FAILED]
    for other in (terminated(137), terminated(1, message="no disk")):
        pods = [told, pod(1, "Failed", containerStatuses=other)]
        assert list_codes([some], pods) == [Code.JOB_FAILED, Code.PODS_FAILED]


def test_a_pod_that_ends_with_its_job_is_cancelled():
    """It was RUNNING."""
    ends = pod(0, metadata={"deletionTimestamp": "2026-01-01T00:01:00Z"})
    facts = build_facts("ns:app-x1", Observation(parents=[job(FAILED_INDEX)], pods=[read_pod(ends)]))
    assert [(each.state, each.reasons) for each in facts.replicas[:2]] == [
        (AppState.CANCELLED, (Reason(code=code),)) for code in (Code.POD_ENDS, Code.HAS_NO_POD)
    ]
    runs = build_facts("ns:app-x1", Observation(parents=[job()], pods=[read_pod(ends)])).replicas[0]
    assert (runs.state, runs.reasons) == (AppState.RUNNING, ())


def test_a_pod_that_was_drained_does_not_stand_for_its_node():
    """Its replacement was deleted: the status named the end of the pod before, as if it had just failed."""
    drained = pod(1, "Failed", containerStatuses=terminated(143))
    running = job() | {"spec": {"parallelism": 2, "completions": 2}}
    status = describe([running], [pod(0), drained])
    assert list_codes([running], [pod(0), drained]) == [Code.PODS_REPLACED_SOON]
    assert [each.state for each in status.roles_statuses[0].replicas][:2] == [AppState.RUNNING, AppState.PENDING]
    cancelled = job(("Failed", "DeadlineExceeded"), annotations={CANCEL_ANNOTATION: "true"})
    replicas = describe([cancelled], [pod(0, "Failed", containerStatuses=terminated(143))]).roles_statuses[0].replicas
    assert {each.state for each in replicas} == {AppState.CANCELLED}


@pytest.mark.parametrize("prefix", ["", "trainer."])
def test_if_the_pods_are_gone_the_annotation_of_the_job_says_why_it_failed(prefix):
    """The job was submitted with `-cfg events=true`. The status did not use what its agents had left in the cluster."""
    told = {f"muster.torchx/{prefix}failed": "2026-01-01T00:00:00Z rank 1 did not enter all_reduce\x1b[2J"}
    failed = job(("Failed", "PodFailurePolicy"), annotations=told)
    lost = Reason(code=Code.POD_LOST, pods=("p",), causes=(Reason(code=Code.POD_DELETED),))
    said, gone, policy = find([failed], [], lost_pod=lost).reasons
    assert (said.code, said.text) == (Code.AGENT_SAID, r"rank 1 did not enter all_reduce\x1b[2J")
    assert (gone, policy.word, policy.text) == (lost, "PodFailurePolicy", "m")


def test_a_pod_without_a_report_shows_its_last_line():
    failed = [pod(0, "Failed", containerStatuses=terminated(3, message="line 1\nSystemExit: 3\n"))]
    status = describe([job(("Failed", "BackoffLimitExceeded"))], failed)
    why, ended = status.facts.reasons
    assert (why.code, ended.code, ended.text) == (Code.TOO_MANY_FAILED, Code.PODS_FAILED, "SystemExit: 3")
    shown = AppStatus(status.state, roles=status.roles_statuses)
    assert "code 3: SystemExit: 3" in shown.format()


def test_other_kinds():
    jobset = {**job(), "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    jobset["status"] = {"conditions": [{"type": "Completed", "status": "True"}]}
    assert describe([jobset], []).state is AppState.SUCCEEDED


def test_an_app_that_is_suspended_without_a_queue_names_the_command_that_resumes_it():
    """It said that it waits for its queue, and there was none."""
    suspended = job(status={}) | {"spec": {"suspend": True}}
    resume = """kubectl -n default patch job app-x1-trainer --type=merge -p '{"spec":{"suspend":false}}'"""
    assert find([suspended], []).reasons == (Reason(code=Code.SUSPENDED, by=resume),)
    suspended["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gpus"
    assert find([suspended], []).reasons == (Reason(code=Code.SUSPENDED_IN_QUEUE, queue="gpus"),)


def test_the_record_of_a_cancelled_app_keeps_the_time_of_its_submission():
    """It had lasted 0 s, whenever it was submitted."""
    queued = job(annotations={}) | {"kind": "Job"}
    queued["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    queued["spec"] = {"template": {"spec": {"containers": [{"image": "i"}]}}}
    record = _build_record(AppRef(namespace="ns", name="app-x1"), queued, "torchx cancel")
    record["metadata"]["creationTimestamp"] = "2026-01-01T00:00:10Z"
    assert find_submitted_s([record]) == find_submitted_s([queued]) == 1767225600


def test_a_pod_that_was_replaced_is_told():
    """Its node runs again, and nothing told of the pod that was lost."""
    lost = pod(0, "Failed", name="a", containerStatuses=terminated(137))
    assert list_codes([job()], [lost, pod(0, created="2026-01-01T00:00:05Z")]) == [Code.POD_REPLACED]
    waits = pod(0, "Pending", created="2026-01-01T00:00:05Z")
    assert list_codes([job()], [lost, waits, pod(1)]) == [Code.POD_REPLACED, Code.PODS_START]
