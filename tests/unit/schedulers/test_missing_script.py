"""A script that is not in the workspace is named before anything is sent: the containers found it out."""

import pytest
from torchx.specs import Role

from muster.components import dist
from muster.schedulers.docker import create_scheduler as create_docker
from muster.schedulers.kubernetes import create_scheduler as create_kubernetes
from muster.schedulers.runner.roles import describe_missing_script
from muster.schedulers.slurm import create_scheduler as create_slurm
from muster.schedulers.ssh import create_scheduler as create_ssh


@pytest.fixture
def workspace(tmp_path):
    (tmp_path / "main.py").touch()
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/train.py").touch()
    return tmp_path


def describe(workspace, **program):
    return describe_missing_script(dist.ddp(j="1x1", **program).roles[0], str(workspace), has_image=True)


@pytest.mark.parametrize(
    ("script", "note"),
    [
        ("main.py", ""),
        ("./tools/train.py", ""),
        ("/opt/main.py", ""),
        ("mainn.py", "mainn.py is not in the workspace FOLDER; the image must have it (did you mean main.py?)"),
        (
            "tools/trainn.py",
            "tools/trainn.py is not in the workspace FOLDER; the image must have it (did you mean tools/train.py?)",
        ),
        ("nowhere/x.py", "nowhere/x.py is not in the workspace FOLDER; the image must have it"),
        ("tools/../../main.py", "tools/../../main.py is not in the workspace FOLDER; the image must have it"),
    ],
)
def test_a_missing_script_is_named_with_what_was_meant(workspace, script, note):
    (workspace.parent / "main.py").touch()
    assert describe(workspace, script=script) == note.replace("FOLDER", str(workspace))


@pytest.mark.parametrize(
    ("ignored", "script", "why"),
    [
        ("*.py", "main.py", ".torchxignore leaves main.py out"),
        ("/tools", "./tools/train.py", ".torchxignore leaves tools out"),
        ("*.py\n!main.py", "main.py", ""),
        ("", "id_train", "muster leaves id_train out by default, and the line !id_train in .torchxignore sends it"),
        ("", "linked/main.py", "the symbolic link linked leads out of it"),
    ],
)
def test_a_script_that_is_left_out_is_named_with_the_reason(workspace, ignored, script, why):
    (workspace / ".torchxignore").write_text(ignored)
    (workspace / "id_train").touch()
    (workspace.parent / "main.py").touch()
    (workspace / "linked").symlink_to("..")
    said = describe(workspace, script=script)
    assert (f"{script} is not sent" in said and why in said) if why else said == ""


def test_what_cannot_be_known_is_not_named(workspace):
    assert describe(workspace, m="some.module") == ""
    assert describe_missing_script(Role(name="r", image="i", entrypoint="sh", args=["mainn.py"]), str(workspace)) == ""


@pytest.mark.parametrize("create", [create_docker, create_kubernetes])
def test_docker_and_kubernetes_say_it_once(create, workspace, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path.parent / "state"))
    scheduler = create("torchx")
    try:
        for _ in range(2):
            role = dist.ddp(j="1x1", script="mainn.py").roles[0]
            scheduler.build_workspace_and_update_role(role, f"file://{workspace}", {})
    finally:
        scheduler.close()
    said = f"in the workspace {workspace}; "
    assert capsys.readouterr().err.count(said) == 1


@pytest.mark.parametrize("create", [create_slurm, create_ssh])
def test_slurm_and_ssh_say_it_once_where_a_workspace_travels(create, workspace, capsys):
    """There is no image that may have the script."""
    scheduler = create("torchx")
    try:
        for _ in range(2):
            role = dist.ddp(j="1x1", script="mainn.py").roles[0]
            scheduler.build_workspace_and_update_role(role, f"file://{workspace}", {"shared": False, "quiet": True})
    finally:
        scheduler.close()
    assert capsys.readouterr().err == (
        f"muster: mainn.py is not in the workspace {workspace} (did you mean main.py?)\n"
    )


def submit_dry(create):
    scheduler = create("torchx")
    try:
        scheduler.submit_dryrun(dist.ddp(script="main.py", j="1x1", image="i"), {})
    finally:
        scheduler.close()


@pytest.mark.parametrize("create", [create_docker, create_kubernetes])
def test_a_script_of_this_folder_without_a_workspace_is_not_sent_and_named(
    create, workspace, monkeypatch, tmp_path, capsys
):
    """A program submitted the job, and its containers found no script."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path.parent / "state"))
    monkeypatch.chdir(workspace)
    said = "main.py of this folder "
    submit_dry(create)
    assert capsys.readouterr().err.count(said) == 1
    (workspace / "main.py").unlink()
    submit_dry(create)
    assert said not in capsys.readouterr().err
