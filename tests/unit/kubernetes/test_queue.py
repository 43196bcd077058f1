"""Apps in a queue of Kueue: a cancel ends them for good, and a resize is Kueue's to allow."""

import copy
import random
import threading

import pytest
from doubles.kubernetes_apps import build_agent_role
from doubles.kubernetes_cluster import Fault
from doubles.kubernetes_kueue import Kueue
from torchx import specs
from torchx.specs.api import AppState

from muster._shared.control import CommandExit
from muster.cli.commands import main as run_muster
from muster.schedulers.errors import EngineError, RightError
from muster.schedulers.kubernetes.api.objects import Objects

FLAVORS = ("job", "jobset")
RUNNING = ("Pending", "Running")


@pytest.fixture
def kueue(cluster):
    """No quota."""
    cluster.kinds["jobset.x-k8s.io/v1alpha2"] = ["jobsets"]
    cluster.kueue = Kueue(cluster, quota=0)
    return cluster.kueue


def submit(scheduler, *roles, **cfg):
    """Returns the app's id and its name."""
    app_id = scheduler.submit(
        specs.AppDef(name="app", roles=list(roles) or [build_agent_role()]), {"queue": "gpu", **cfg}
    )
    return app_id, app_id.partition(":")[2]


def let_run(kueue, quota=100):
    kueue.quota = quota
    for _ in range(3):
        kueue.reconcile()


def find_objects(cluster):
    """All but events and what belongs to the queue itself."""
    return sorted((plural, name) for _, _, plural, name in cluster.objects if plural not in ("events", "localqueues"))


def list_pods(cluster):
    return [pod["metadata"]["name"] for pod in cluster.find("pods") if pod["status"]["phase"] in RUNNING]


@pytest.mark.parametrize("flavor", FLAVORS)
def test_a_queued_app_runs_when_there_is_quota(cluster, scheduler, kueue, flavor):
    """What the other tests would see without a cancel."""
    app_id, _ = submit(scheduler, flavor=flavor)
    assert list_pods(cluster) == []
    assert "gpu: insufficient unused" in scheduler.describe(app_id).msg
    let_run(kueue)
    assert list_pods(cluster)
    assert kueue.starts


@pytest.mark.parametrize("least", [None, 1])
@pytest.mark.parametrize("flavor", FLAVORS)
def test_a_queued_app_that_is_cancelled_never_starts(cluster, scheduler, kueue, flavor, least):
    """A suspended Job ignores its deadline: it started later. Its workload stayed in the queue."""
    app_id, name = submit(scheduler, build_agent_role(least=least), flavor=flavor)
    scheduler.cancel(app_id)
    assert cluster.find("workloads") == [], "nothing of it is in the queue"
    assert find_objects(cluster) == [("jobs", name)], "the record, without pods"
    [record] = cluster.find("jobs")
    assert "kueue.x-k8s.io/queue-name" not in record["metadata"]["labels"]
    assert (record["spec"]["parallelism"], record["spec"]["completions"]) == (0, 0)
    let_run(kueue)
    assert (kueue.starts, list_pods(cluster)) == ([], [])
    status = scheduler.describe(app_id)
    assert status.state is AppState.CANCELLED
    assert [each.state for role in status.roles_statuses for each in role.replicas] == [AppState.CANCELLED] * 2
    assert [(app.app_id, app.state) for app in scheduler.list()] == [(app_id, AppState.CANCELLED)]
    scheduler.cancel(app_id)
    assert find_objects(cluster) == [("jobs", name)]
    scheduler.delete(app_id)
    assert find_objects(cluster) == []


@pytest.mark.parametrize("flavor", FLAVORS)
def test_an_app_that_runs_by_its_queue_ends_with_a_cancel(cluster, scheduler, kueue, flavor):
    """A JobSet that a cancel had suspended was started again by Kueue."""
    app_id, _ = submit(scheduler, flavor=flavor)
    let_run(kueue)
    assert list_pods(cluster)
    starts = list(kueue.starts)
    scheduler.cancel(app_id)
    let_run(kueue)
    assert (kueue.starts, list_pods(cluster)) == (starts, [])
    assert scheduler.describe(app_id).state is AppState.CANCELLED


def test_an_app_that_its_queue_has_preempted_ends_with_a_cancel(cluster, scheduler, kueue):
    app_id, name = submit(scheduler)
    let_run(kueue)
    cluster.start_pod(cluster.find_pod(name, 0))
    kueue.evict()
    assert list_pods(cluster) == []
    scheduler.cancel(app_id)
    let_run(kueue)
    assert list_pods(cluster) == []
    assert scheduler.describe(app_id).state is AppState.CANCELLED


@pytest.mark.parametrize("flavor", FLAVORS)
def test_an_app_that_is_created_suspended_can_be_cancelled(cluster, scheduler, kueue, flavor):
    app_id, name = submit(scheduler, flavor=flavor, queue=None, suspend=True)
    assert list_pods(cluster) == []
    scheduler.cancel(app_id)
    assert find_objects(cluster) == [("jobs", name)]
    assert scheduler.describe(app_id).state is AppState.CANCELLED


def test_of_two_roles_one_runs_and_one_waits(cluster, scheduler, kueue):
    """The Job that ran keeps the record. The first role's may go, too: it owns the other no more."""
    app_id, name = submit(scheduler, build_agent_role("big", nodes=4), build_agent_role("small", nodes=1))
    let_run(kueue, quota=1)
    assert [pod.startswith(f"{name}-small") for pod in list_pods(cluster)] == [True]
    scheduler.cancel(app_id)
    let_run(kueue)
    assert list_pods(cluster) == []
    assert [job["metadata"]["name"] for job in cluster.find("jobs")] == [f"{name}-small"]
    status = scheduler.describe(app_id)
    assert status.state is AppState.CANCELLED
    assert [each.state for role in status.roles_statuses for each in role.replicas] == [AppState.CANCELLED] * 5
    scheduler.delete(app_id)
    assert find_objects(cluster) == []


def test_a_role_that_waits_does_not_start_after_another_has_failed(cluster, scheduler, kueue):
    app_id, name = submit(scheduler, build_agent_role("big", nodes=4), build_agent_role("small", nodes=1))
    let_run(kueue, quota=1)
    pod = cluster.find_pod(f"{name}-small", 0)
    cluster.start_pod(pod)
    cluster.end_pod(pod, 1)
    scheduler.close()  # the process that submitted it looks a last time
    let_run(kueue)
    assert list_pods(cluster) == []
    assert scheduler.describe(app_id).state is AppState.FAILED


@pytest.mark.soak
@pytest.mark.parametrize("flavor", FLAVORS)
def test_quota_that_comes_and_goes_during_a_cancel(cluster, scheduler, kueue, flavor):
    app_id, _ = submit(scheduler, flavor=flavor)
    ends = threading.Event()

    def change_quota():
        while not ends.is_set():
            if random.random() < 0.5:
                kueue.quota = 100
                kueue.reconcile()
            else:
                kueue.evict()
            ends.wait(random.random() * 0.003)

    changes = threading.Thread(target=change_quota)
    changes.start()
    try:
        scheduler.cancel(app_id)
    finally:
        ends.set()
        changes.join()
    starts = list(kueue.starts)
    let_run(kueue)
    assert (kueue.starts, list_pods(cluster)) == (starts, [])
    assert [each for each in cluster.find("workloads") if not kueue.has_ended(each)] == []
    assert scheduler.describe(app_id).state is AppState.CANCELLED


def test_an_elastic_app_in_a_queue_is_resized(cluster, scheduler, kueue, capsys):
    """Kueue refuses it where it admits a part of a Job, which all elastic apps asked for."""
    app_id, name = submit(scheduler, build_agent_role(nodes=4, least=2))
    let_run(kueue)
    assert run_muster(["resize", f"kubernetes://session/{app_id}", "3"]) == 0
    partial, other = submit(scheduler, build_agent_role(nodes=4, least=2), kueue_elastic="partial")
    let_run(kueue)
    assert run_muster(["resize", f"kubernetes://session/{partial}", "3"]) == CommandExit.REFUSED
    assert "Kueue admitted a" in capsys.readouterr().err
    sizes = {job["metadata"]["name"]: job["spec"]["parallelism"] for job in cluster.find("jobs")}
    assert sizes == {f"{name}-trainer": 3, f"{other}-trainer": 4}


@pytest.mark.parametrize("removes", [False, True])
@pytest.mark.parametrize("fault", ["refused", "interrupted"])
def test_a_cancel_that_fails_hides_no_jobset_that_runs(cluster, scheduler, kueue, monkeypatch, fault, removes):
    """The record hid it: CANCELLED, a second cancel did nothing, and `muster delete` removed only the record."""
    app_id, name = submit(scheduler, flavor="jobset")
    let_run(kueue)
    with monkeypatch.context() as patched:
        if fault == "refused":
            cluster.faults.append(Fault("DELETE", "/jobsets/", 403, "forbidden", "Forbidden"))
        else:
            patched.setattr(Objects, "delete", interrupt)
        with pytest.raises((EngineError, KeyboardInterrupt)):
            scheduler.cancel(app_id)
    assert list_pods(cluster)
    assert scheduler.describe(app_id).state is AppState.RUNNING
    if removes:
        scheduler.delete(app_id)
    else:
        scheduler.cancel(app_id)
        assert scheduler.describe(app_id).state is AppState.CANCELLED
    let_run(kueue)
    assert list_pods(cluster) == []
    assert find_objects(cluster) == ([] if removes else [("jobs", name)])


def interrupt(*_args, **_more):
    raise KeyboardInterrupt


def test_a_jobset_created_suspended_whose_cancel_failed_is_deleted_by_the_next(cluster, scheduler, kueue):
    app_id, name = submit(scheduler, flavor="jobset", queue=None, suspend=True)
    cluster.faults.append(Fault("DELETE", "/jobsets/", 403, "forbidden", "Forbidden"))
    with pytest.raises(EngineError):
        scheduler.cancel(app_id)
    scheduler.cancel(app_id)
    assert find_objects(cluster) == [("jobs", name)]


@pytest.mark.parametrize("queue", [None, "gpu"])
def test_a_stop_without_the_right_to_delete_a_jobset_changes_nothing(cluster, scheduler, kueue, queue, capsys):
    """It was marked as cancelled first, so its state was CANCELLED, and it could be started."""
    app_id, name = submit(scheduler, flavor="jobset", queue=queue, suspend=queue is None)
    before, objects = copy.deepcopy(cluster.find("jobsets")), find_objects(cluster)
    cluster.faults.append(Fault("DELETE", "/jobsets/", 403, "forbidden", "Forbidden"))
    assert run_muster(["stop", f"kubernetes://session/{app_id}"]) == CommandExit.REFUSED
    assert f"to delete jobset/{name}" in capsys.readouterr().err
    assert find_objects(cluster) == objects
    assert cluster.find("jobsets") == before
    assert scheduler.describe(app_id).state is not AppState.CANCELLED
    assert run_muster(["stop", f"kubernetes://session/{app_id}"]) == 0
    assert find_objects(cluster) == [("jobs", name)]
    assert scheduler.describe(app_id).state is AppState.CANCELLED


def test_a_queued_job_that_may_not_be_deleted_is_said_to_be_left(cluster, scheduler, kueue):
    app_id, name = submit(scheduler)
    cluster.faults.append(Fault("DELETE", "/jobs/", 403, "forbidden", "Forbidden", times=2))
    with pytest.raises(EngineError, match=r"^the cancel is ") as error:
        scheduler.cancel(app_id)
    assert not isinstance(error.value, RightError)
    assert [job["metadata"]["name"] for job in cluster.find("jobs")] != [name]


def test_a_record_that_cannot_be_created_after_the_end_is_no_refusal(cluster, scheduler, kueue):
    """The line of a missing right means that nothing was changed."""
    app_id, name = submit(scheduler, flavor="jobset")
    cluster.faults.append(Fault("POST", "/jobs", 403, "forbidden", "Forbidden", times=2))
    with pytest.raises(EngineError, match=f"^{name} is cancelled and ") as error:
        scheduler.cancel(app_id)
    assert not isinstance(error.value, RightError)
    assert find_objects(cluster) == []


def test_a_cancel_counts_where_one_role_had_ended_and_another_was_queued(cluster, scheduler, kueue):
    """The queued Job was deleted, the other one had succeeded: so had the app."""
    other = build_agent_role()
    other.name = "eval"
    app_id, _ = submit(scheduler, build_agent_role(), other)
    done, _ = sorted(cluster.find("jobs"), key=lambda job: job["metadata"]["name"], reverse=True)
    done["spec"]["suspend"] = False
    done["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    scheduler.cancel(app_id)
    assert [job["metadata"]["name"] for job in cluster.find("jobs")] == [done["metadata"]["name"]]
    assert scheduler.describe(app_id).state is AppState.CANCELLED


@pytest.mark.parametrize(("condition", "state"), [("Completed", AppState.SUCCEEDED), ("Failed", AppState.FAILED)])
def test_a_jobset_that_has_ended_in_its_queue_is_left_alone(cluster, scheduler, kueue, condition, state):
    """A cancel deleted it: SUCCEEDED became CANCELLED."""
    app_id, _ = submit(scheduler, flavor="jobset")
    let_run(kueue)
    [jobset] = cluster.find("jobsets")
    jobset["status"] = {"conditions": [{"type": condition, "status": "True"}]}
    for pod in list(cluster.find("pods")):
        cluster.delete_object(("/api/v1", "team", "pods", pod["metadata"]["name"]))
    objects = find_objects(cluster)
    assert scheduler.describe(app_id).state is state
    scheduler.cancel(app_id)
    assert scheduler.describe(app_id).state is state
    assert find_objects(cluster) == objects
