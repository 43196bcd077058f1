"""Which app a word of a person means."""

import os

import pytest
from torchx.specs import AppState

from muster._shared.control import CommandExit, ControlError
from muster.cli import commands, operations
from muster.cli.handles import find_app, list_names
from muster.schedulers import kubernetes
from muster.schedulers.adapter.scheduler import ListedApp
from muster.schedulers.errors import EngineError, NotConfiguredError
from muster.schedulers.kubernetes.scheduler import KubernetesScheduler
from muster.schedulers.supervision.app_folder import AppFolder
from muster.schedulers.supervision.registry import AppRegistry, record_last_remote


@pytest.fixture
def env(tmp_path, monkeypatch):
    """A home without a kubeconfig and with three apps, the oldest first."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    state = tmp_path / "muster"
    state.mkdir()
    for order, (scheduler, app_id) in enumerate(
        (("detached", "main"), ("local_cwd", "main-a1"), ("docker", "eval-b2"))
    ):
        folder = AppFolder(tmp_path / app_id)
        folder.spec_file.parent.mkdir(parents=True)
        folder.spec_file.touch()
        AppRegistry(state, scheduler).add(app_id, folder.path)
        os.utime(state / scheduler / app_id, ns=(0, order), follow_symlinks=False)
    return {"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)}


@pytest.mark.parametrize(
    ("word", "handle"),
    [
        ("local_cwd://torchx/main-a1", "local_cwd://torchx/main-a1"),
        ("local_cwd://main-a1", "local_cwd://torchx/main-a1"),
        ("local_cwd:///main-a1", "local_cwd://torchx/main-a1"),
        ("local_docker://torchx/eval", "local_docker://torchx/eval-b2"),
        ("main-a1", "local_cwd://torchx/main-a1"),
        ("main-a", "local_cwd://torchx/main-a1"),
        ("main", "detached://torchx/main"),  # a whole name counts before the beginning of another
        ("eval", "docker://torchx/eval-b2"),
        ("last", "docker://torchx/eval-b2"),
        ("kubernetes://torchx/team:train", "kubernetes://torchx/team:train"),
        ("team:train", "kubernetes://torchx/team:train"),
        ("slurm://torchx/12", "slurm://torchx/12"),  # the caller says whom it can ask
        ("local_cwd://torchx/gone", "local_cwd://torchx/gone"),
    ],
)
def test_what_a_word_means(word, handle, env):
    assert str(find_app(word, env)) == handle


def test_apps_of_another_packages_adapter_have_names_too(env, tmp_path):
    """They had to be given as a handle, and were never the last."""
    state, folder = tmp_path / "muster", AppFolder(tmp_path / "tune-c3")
    folder.spec_file.parent.mkdir(parents=True)
    folder.spec_file.touch()
    (state / "logs" / "torchx").mkdir(parents=True)  # no scheduler's
    AppRegistry(state, "folders").add("tune-c3", folder.path)
    assert str(find_app("tune", env)) == "folders://torchx/tune-c3"
    assert str(find_app("folders://torchx/tune", env)) == "folders://torchx/tune-c3"
    assert str(find_app("last", env)) == "folders://torchx/tune-c3"
    assert list_names(env) == ["last", "main", "eval-b2", "tune-c3", "main-a1"]


def test_last_is_the_newest_also_in_a_cluster(env, tmp_path):
    record_last_remote(tmp_path / "muster", "kubernetes", "team:train-9")
    assert str(find_app("last", env)) == "kubernetes://torchx/team:train-9"


def refuse_all(monkeypatch):
    """Make schedulers of which none can be asked."""

    class Scheduler:
        backend = "kubernetes"

        def describe_app(self, app_id):
            raise NotConfiguredError("no cluster is configured")

        read_facts = describe_app

        def close(self):
            pass

    monkeypatch.setattr(operations, "create_scheduler", lambda name: Scheduler())


@pytest.mark.parametrize("words", [["status", "last"], ["status"], ["log"], ["events", "last"], ["delete", "last"]])
def test_a_last_job_that_cannot_be_reached_is_named(words, env, tmp_path, monkeypatch, capsys):
    """The line did not name the job: "no cluster is configured"."""
    record_last_remote(tmp_path / "muster", "kubernetes", "team:train-9")
    refuse_all(monkeypatch)
    assert commands.main(words) == CommandExit.LOST
    last = "muster: last is kubernetes://torchx/team:train-9, and no cluster is configured"
    assert capsys.readouterr().err == f"{last}\n"
    assert commands.main(["status", "kubernetes://torchx/team:train-9"]) == CommandExit.LOST
    assert "last" not in capsys.readouterr().err, "a job that is named needs no explanation"


def test_a_last_job_that_was_deleted_is_named(env, tmp_path, monkeypatch, capsys):
    record_last_remote(tmp_path / "muster", "kubernetes", "team:train-9")
    cluster = Cluster()
    cluster.read_facts, cluster.close = cluster.describe_app, lambda: None
    monkeypatch.setattr(operations, "create_scheduler", lambda name: cluster)
    assert commands.main(["status"]) == CommandExit.UNKNOWN
    last = "muster: last is kubernetes://torchx/team:train-9, and team:train-9 is gone"
    assert capsys.readouterr().err == f"{last}\n"


def test_a_job_id_of_slurm_names_its_app(env, tmp_path):
    """It is what squeue shows: of the first job, of a follow-up that a node has submitted, and no part of one."""
    folder = AppFolder(tmp_path / "train-d4")
    folder.state_dir.mkdir(parents=True)
    folder.spec_file.touch()
    (folder.state_dir / "jobs").write_text("12345\n12346\n")
    AppRegistry(tmp_path / "muster", "slurm").add("train-d4", folder.path)
    for word in ("12345", "12346", "slurm://12345"):
        assert str(find_app(word, env)) == "slurm://torchx/train-d4"
    line = (
        "no job that was submitted here has the Slurm job id 1234, and no job is named '1234'; `muster list` lists them"
    )
    with pytest.raises(ControlError) as caught:
        find_app("1234", env)
    assert str(caught.value) == line
    assert str(find_app("slurm://torchx/1234", env)) == "slurm://torchx/1234", "its adapter says that there is none"


@pytest.mark.parametrize(
    ("word", "line", "code"),
    [
        ("mai", "'mai' may be any of 2 jobs: detached://torchx/main, local_cwd://torchx/main-a1", CommandExit.USAGE),
        ("none", "no job is named 'none'; `muster list` lists them", CommandExit.UNKNOWN),
        ("a/b/c", "'a/b/c' is not an app handle; an example is local_cwd://torchx/train-x7k2", CommandExit.USAGE),
    ],
)
def test_what_names_no_app(word, line, code, env):
    with pytest.raises(ControlError) as caught:
        find_app(word, env)
    assert (str(caught.value), caught.value.exit_code) == (line, code)


def test_no_last_job(tmp_path):
    with pytest.raises(ControlError, match="no last job"):
        find_app("last", {"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)})


@pytest.fixture
def serve(env, monkeypatch):
    """Return what makes a cluster that has these apps, of which the context's namespace lists some."""
    monkeypatch.setenv("KUBECONFIG", "config")

    def serve(*app_ids, listed=()):
        cluster = Cluster(app_ids)
        for name in ("describe_app", "describe_unknown", "describe_place"):
            monkeypatch.setattr(KubernetesScheduler, name, staticmethod(getattr(cluster, name)))
        apps = [ListedApp(app_id=app_id, state=AppState.RUNNING) for app_id in listed]
        monkeypatch.setattr(KubernetesScheduler, "list_apps", lambda _self, cfg: apps)

    return serve


def test_a_name_that_no_local_app_has_is_looked_up_in_the_cluster(env, serve):
    serve(listed=("team:train-1", "team:other"))
    assert str(find_app("tr", env)) == "kubernetes://torchx/team:train-1"


class Cluster:
    """A cluster that has some jobs."""

    def __init__(self, apps=()):
        self.apps = apps

    def describe_place(self, app_id):
        return f"namespace {'team' if app_id is None else app_id.partition(':')[0]!r} of context 'c'"

    def describe_app(self, app_id):
        return app_id if app_id in self.apps else None

    def describe_unknown(self, app_id):
        return f"{app_id} is gone"


GONE = (
    "it may have been deleted, removed after its ttl_s, or be in another namespace (name it as NAMESPACE:NAME) or "
    "context; `muster list` lists the jobs of this machine and of the current context's namespace"
)


def test_the_last_job_of_a_cluster_that_was_deleted_is_no_typo(env, tmp_path, serve):
    record_last_remote(tmp_path / "muster", "kubernetes", "team:train-9")
    serve()
    for word in ("train-9", "train"):
        with pytest.raises(ControlError) as caught:
            find_app(word, env)
        assert (str(caught.value), caught.value.exit_code) == ("team:train-9 is gone", CommandExit.UNKNOWN)
    place = "namespace 'team' of context 'c'"
    with pytest.raises(ControlError) as caught:
        find_app("rain", env)
    assert str(caught.value) == f"no job is named 'rain' on this machine or in {place}: {GONE}"


def test_what_is_said_of_an_app_that_a_cluster_does_not_have(env, tmp_path, monkeypatch):
    monkeypatch.setattr(KubernetesScheduler, "describe_place", lambda self, app_id: "the place")
    scheduler = kubernetes.create_scheduler("torchx")
    assert scheduler.describe_unknown("team:train") == f"there is no job 'train' in the place: {GONE}"
    record_last_remote(tmp_path / "muster", "kubernetes", "team:train-9")
    deleted = (
        "team:train-9, the last job that was submitted to Kubernetes from here, no longer exists in the cluster of "
        "this kubeconfig: its Job was deleted, or removed after its ttl_s"
    )
    for app_id in ("train-9", "team:train-9"):
        assert scheduler.describe_unknown(app_id) == deleted
    for app_id in ("train", "other:train:c"):
        assert scheduler.describe_unknown(app_id) == f"there is no job 'train' in the place: {GONE}"
    scheduler.close()


def test_the_last_job_of_another_namespace_has_its_name(env, tmp_path, serve, monkeypatch):
    record_last_remote(tmp_path / "muster", "kubernetes", "other:train-9")
    serve("other:train-9")
    assert str(find_app("train", env)) == "kubernetes://torchx/other:train-9"
    monkeypatch.delenv("KUBECONFIG")
    with pytest.raises(ControlError, match="is named 'train'"):
        find_app("train", env)  # without a cluster nothing is known of it


def test_a_cluster_that_does_not_answer_for_the_last_job(env, tmp_path, serve, monkeypatch):
    def fail(self, app_id):
        raise EngineError("it does not answer")

    record_last_remote(tmp_path / "muster", "kubernetes", "other:train-9")
    serve()
    monkeypatch.setattr(KubernetesScheduler, "describe_app", fail)
    with pytest.raises(ControlError, match=r"'train'; .* not answer"):
        find_app("train", env)


def test_names_for_the_shell(env):
    assert list_names(env) == ["last", "main", "eval-b2", "main-a1"]
