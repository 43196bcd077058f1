"""From an AppDef to a script, and Slurm's words to ours: no Slurm is needed."""

import subprocess
import zipfile
from dataclasses import replace
from io import BytesIO

import pytest
from torchx.specs import AppDef, Resource, Role
from torchx.specs.builders import materialize_appdef

from muster.components import dist
from muster.schedulers.errors import EngineError, OptionError, SchedulerError
from muster.schedulers.runner.option_parsing import StrictOpts
from muster.schedulers.runner.option_records import declare_options, parse_options
from muster.schedulers.slurm import client, create_scheduler, node, reasons
from muster.schedulers.slurm.client import QueueEntry
from muster.schedulers.slurm.hosts import expand_hosts
from muster.schedulers.slurm.node import Allocation, list_replicas, place_replicas
from muster.schedulers.slurm.options import SlurmOptions
from muster.schedulers.slurm.request import SubmissionSite, _count_seconds, build_payload, build_request, list_files
from muster.schedulers.slurm.scheduler import list_pauses
from muster.schedulers.wording.words import word

SITE = SubmissionSite(folder="/home/me/jobs/a", cwd="/home/me/code", python="/home/me/venv/bin/python")


def build_role(name="train", nodes=2, gpu=0, least=None, **fields):
    args = ["-m", "muster.agent", "--nnodes", f"{least or nodes}:{nodes}", "--rdzv-id", "x", "train.py"]
    resource = Resource(cpu=4, gpu=gpu, memMB=2048)
    return Role(name, image="", entrypoint="python3", args=args, num_replicas=nodes, min_replicas=least,
                resource=resource, **fields)  # fmt: skip


def build(*roles, **cfg):
    opts = StrictOpts("slurm")
    declare_options(opts, SlurmOptions)
    app = AppDef("train", roles=list(roles) or [build_role()])
    return build_request(app, parse_options(SlurmOptions, opts, cfg), name="train-x", token="t0ken", site=SITE)


def test_the_script_only_starts_the_tasks():
    request = build(build_role(nodes=4, least=2, gpu=8), partition="gpu", time="1-0", account="me", spares=1)
    first, *flags, last = request.script.splitlines()
    assert first == "#!/bin/sh"
    assert all(line.startswith("#SBATCH --") for line in flags)
    assert {
        "#SBATCH --nodes=5",
        "#SBATCH --gres=gpu:8",
        "#SBATCH --mem=2048M",
        "#SBATCH --no-kill",
        "#SBATCH --requeue",
        "#SBATCH --partition=gpu",
        "#SBATCH --time=1-0",
        "#SBATCH --account=me",
    } <= set(flags)
    assert last.startswith("exec srun ")
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0", '--nodes="$SLURM_JOB_NUM_NODES"'} <= set(last.split())
    assert "t0ken" not in str(request)


def test_a_job_that_needs_all_its_nodes_leaves_a_lost_one_to_slurm():
    assert "--no-kill" not in build(build_role(nodes=4)).script


@pytest.mark.parametrize(
    ("cfg", "line"),
    [
        ({"gpus": "tres", "gpu_type": "a100"}, "#SBATCH --gpus-per-node=a100:8"),
        ({"gpu_type": "a100"}, "#SBATCH --gres=gpu:a100:8"),
        ({"exclusive": True}, "#SBATCH --mem=0"),
        ({"segment": 2}, "#SBATCH --segment=2"),
        ({"signal": "USR1@120"}, "#SBATCH --signal=USR1@120"),
        ({"mail-user": "a@b.c"}, "#SBATCH --mail-user=a@b.c"),
        ({"comment": "two words"}, "#SBATCH '--comment=two words'"),
        ({"modules": "cuda/12;gcc"}, "module load gcc"),
        ({"prolog": "ulimit -l unlimited"}, "ulimit -l unlimited"),
        ({"continues": "no"}, "#SBATCH --no-requeue"),
        ({"sbatch": "--licenses=a --exclude=n7"}, "#SBATCH --exclude=n7"),
    ],
)
def test_each_option_is_a_line(cfg, line):
    assert line in build(build_role(gpu=8), **cfg).script.splitlines()


@pytest.mark.parametrize(
    ("words", "cpus"),
    [
        (["-j", "4x8", "--gpu", "8"], 8),
        (["-j", "4xgpu", "--gpu", "8"], 8),
        (["-j", "4x8", "--gpu", "8", "--cpu", "2"], 2),
        (["-j", "4x8", "--cpu", "96"], 96),
        (["-j", "4x1"], 2),
    ],
)
def test_each_worker_has_a_cpu_unless_the_user_says_how_many(words, cpus):
    """Eight workers of a node shared two."""
    [role] = materialize_appdef(dist.ddp, ["--script", "main.py", *words]).roles
    script = build(role).script
    assert script.count(f"--cpus-per-task={cpus}") == script.count("--cpus-per-task=") == 2, script


def test_workers_have_all_cpus_of_whole_nodes():
    """A step with a number of CPUs is bound to so many, though nobody else may use the others."""
    script = build(build_role(gpu=8), exclusive=True).script
    assert "--cpus-per-task" not in script
    assert "#SBATCH --mincpus=4" in script.splitlines(), script


@pytest.mark.parametrize("time", ["90", "4:00:00", "1-12", "1-12:30", "90:30", "infinite"])
def test_time_limits_are_in_slurms_own_forms(time):
    assert f"#SBATCH --time={time}\n" in build(time=time).script


@pytest.mark.parametrize(
    ("cfg", "refused"),
    [({}, True), ({"prefix": "apptainer exec a.sif"}, False), ({"container_image": "a.sqsh"}, False)],
)
def test_a_script_that_does_not_exist_is_refused_before_it_waits_in_the_queue(tmp_path, monkeypatch, cfg, refused):
    """Where the job runs in the current folder. In an image there may be other files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(client, "run", lambda command, **_more: "--container-image --container-mounts" if
                        "--help" in command else pytest.fail(f"{command}") if refused else "7")  # fmt: skip
    monkeypatch.setattr(client, "can_wait_for_children", lambda: False)
    client.read_help.cache_clear()
    scheduler = create_scheduler("test")
    info = scheduler.submit_dryrun(AppDef("train", roles=[build_role()]), cfg)
    if refused:
        with pytest.raises(SchedulerError, match=rf"script: train.py \(in {tmp_path}\)"):
            scheduler.schedule(info)
        (tmp_path / "train.py").touch()
        monkeypatch.setattr(client, "run", lambda *_words, **_more: "7")
    assert scheduler.schedule(info).startswith("train-")
    client.read_help.cache_clear()


def test_images_are_srun_options_or_a_prefix():
    script = build(container_image="torch.sqsh", container_mounts="/data:/data").script
    mounts = "/home/me/jobs/a:/home/me/jobs/a,/home/me/code:/home/me/code,/data:/data"
    assert f" --container-image=torch.sqsh --container-mounts={mounts} python3 /home/me/jobs/a/" in script
    unshared = build(container_image="torch.sqsh", shared=False).script
    assert "--container-mounts=/tmp:/tmp python3 " in unshared, "the app's folder is made in it, by the tasks"
    assert build(prefix="apptainer exec a.sif").spec.details["prefix"] == ["apptainer", "exec", "a.sif"]


@pytest.mark.parametrize(
    ("cfg", "task", "agent"),
    [
        ({}, SITE.python, SITE.python),
        ({"container_image": "a.sqsh"}, "python3", "python3"),
        ({"container_image": "a.sqsh", "python": "/opt/py"}, "/opt/py", "/opt/py"),
        ({"prefix": "/usr/bin/apptainer exec a.sif"}, SITE.python, "python3"),
        ({"prefix": "podman-hpc run torch"}, SITE.python, "python3"),
        ({"prefix": "numactl -l"}, SITE.python, SITE.python),
    ],
)
def test_no_image_needs_the_callers_environment(cfg, task, agent):
    """The caller's Python was named in an image, which does not have it."""
    request = build(**cfg)
    assert f" {task} /home/me/jobs/a/" in request.script
    assert request.spec.details["replicas"]["train"][0]["command"][0] == agent


@pytest.mark.parametrize(
    ("continues", "line"),
    [
        ("requeue", '[ "$code" -ne 250 ] || scontrol requeue "$SLURM_JOB_ID"'),
        ("expedite", '[ "$code" -ne 250 ] || scontrol requeue expedite "$SLURM_JOB_ID"'),
        ("follow-up", 'afterany:"$SLURM_JOB_ID" /home/me/jobs/a/'),
    ],
)
def test_the_script_does_what_an_image_without_slurm_cannot(continues, line):
    script = build(container_image="a.sqsh", continues=continues).script
    assert line in script
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("cfg", "text"),
    [
        ({"sbatch": "--array=0-3"}, "submit an app for each task"),
        ({"sbatch": "-n4"}, "must be a long option"),
        ({"srun": "--nodes=1"}, "the adapter sets --nodes itself"),
        ({"srun": "--container-image=a.sqsh"}, "srun: .*: use container_image=a.sqsh"),
        ({"sbatch": "--container-mounts=/a-b:/a-b"}, "use container_mounts=/a-b:/a-b"),
        ({"signal": "TERM@60"}, "USR1@SECONDS"),
        ({"time": "4h"}, "time='4h' is not minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS, such as 4:00:00"),
        ({"gpus": "mig"}, "gres, tres, none"),
        ({"shared": "false", "continues": "follow-up"}, "shared=true"),
        ({"workspace_type": "docker"}, "slurm_torchx"),
        ({"partitoin": "gpu"}, "did you mean 'partition'"),
        ({"container_mounts": "/data:/data"}, "needs container_image=IMAGE"),
        ({"gpu_type": "a100", "gpus": "none"}, "gpus=none asks for no GPU"),
        ({"comment": "two\nlines"}, r"comment='two\\nlines' must be one line"),
        ({"sbatch": "'--licenses=a\nrm x'"}, "licenses=.* must be one line"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(cfg, text):
    with pytest.raises(OptionError, match=text):
        build(**cfg)


def test_options_with_options_in_them_come_through_a_command_line():
    opts = StrictOpts("slurm")
    declare_options(opts, SlurmOptions)
    cfg = opts.cfg_from_str("sbatch=--licenses=a --exclude=n1,n2,modules=cuda/12;gcc/13,prolog=. /env.sh && A=b")
    options = parse_options(SlurmOptions, opts, cfg)
    assert options.sbatch == ("--licenses=a", "--exclude=n1,n2")
    assert (options.modules, options.prolog) == (("cuda/12", "gcc/13"), ". /env.sh && A=b")


def test_spares_need_one_role_of_agents():
    with pytest.raises(OptionError, match=r"agents, and has 2$"):
        build(build_role("a"), build_role("b"), spares=1)
    with pytest.raises(OptionError, match=r"^spares=99999 is more than 16384$"):
        build(build_role("a"), spares=99999)


def test_tasks_are_the_replicas_in_order_and_spares_come_last():
    spec = build(build_role("a", 2), Role("b", image="", entrypoint="sh", args=["-c", "x"]), spares=1).spec
    assert [str(each) for each in list_replicas(spec)] == ["a/0", "a/1", "b/0", "a/2"]


def test_a_job_that_was_resized_runs_again_with_fewer_nodes():
    spec = build(build_role("a", 3, least=1), Role("b", image="", entrypoint="sh", args=["-c", "x"])).spec
    assert [str(each) for each in place_replicas(spec, {"a": 1}, 4)] == ["a/0", "a/1", "a/2", "b/0"]
    assert [str(each) for each in place_replicas(spec, {"a": 1}, 2)] == ["a/0", "b/0"]
    assert [str(each) for each in place_replicas(spec, {}, 3)] == ["a/0", "a/1", "a/2"]


def test_a_node_without_the_shared_folder_gets_all_in_one_zip():
    request = build(shared=False, node_dir="/scratch")
    assert 'bundle=/scratch/muster-train-x".$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.zip"\n' in request.script
    assert 'sbcast --preserve "$bundle.sent" "$bundle" || exit 97\n' in request.script
    assert "set -C\nbase64 -d >\"$bundle.sent\" <<'MUSTER_END_OF_PAYLOAD' || exit 97\n" in request.script
    files = list_files(request.spec, b"agent", b"workspace")
    names = zipfile.ZipFile(BytesIO(build_payload(files))).namelist()
    assert {"files/spec.json", "files/private.json", "files/muster-agent.zip", "__main__.py"} <= set(names)
    assert not [name for name in names if "torchx" in name]
    assert len(build_payload({})) < 250_000


def test_node_lists_are_expanded():
    assert expand_hosts("gpu[01-03,7],login") == ["gpu01", "gpu02", "gpu03", "gpu7", "login"]
    assert expand_hosts("r[1-2]n[1-2]") == ["r1n1", "r1n2", "r2n1", "r2n2"]
    assert expand_hosts("") == []


def test_an_allocation_is_read_from_the_environment():
    env = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_PROCID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}
    found = Allocation.of({**env, "SLURM_JOB_END_TIME": "1700000000"})
    assert (found.run, found.task, found.hosts, found.end_s) == ("7.2", 1, ("n1", "n2"), 1700000000.0)
    assert Allocation.of(env).end_s is None


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("Priority", "higher priority are before it (Priority)"),
        ("Resources", "free nodes"),
        ("QOSSomethingNew", "a limit of its quality of service is reached"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-4]", "down, drained or reserved"),
        ("BeginTime", "time to begin has not come"),
        ("SomethingNew", "SomethingNew"),
        ("JobHeldUser", "scontrol release 7 lets it go on (JobHeldUser)"),
        ("job requeued in held state", "scontrol release 7 lets it go on (job requeued in held state)"),
        ("launch failed requeued held", "scontrol release 7 tries again (launch failed requeued held)"),
    ],
)
def test_reasons_are_plain_words(reason, text):
    """Slurm tells when it begins, also of a job that is held; a time that is over is left out."""
    entry = QueueEntry(job_id="7", state="PENDING", reason=reason, start_s=9e9)
    line = word(reasons.explain_wait(entry))
    assert line.startswith("job 7 waits: ")
    assert text in line
    assert ("; starts about 2255-" in line) is ("scontrol release" not in text)
    assert "starts about" not in word(reasons.explain_wait(replace(entry, start_s=1e9)))


def test_rows_of_squeue_are_read():
    submitted = "2026-01-01T00:30:00"
    text = f"9|PENDING|Priority||{submitted}|N/A|2026-01-01T01:00:00\n8|RUNNING|None|n[1-2]|{submitted}|NONE|x\n"
    first, second = client._parse_rows(text)
    assert (first.job_id, first.nodes, first.reason, first.end_s) == ("8", ("n1", "n2"), "", None)
    assert second.start_s == client.parse_time("2026-01-01T01:00:00")
    assert second.submitted_s == client.parse_time(submitted)


ENDED = "EndTime=2026-01-01T01:00:00 Deadline=N/A ExitCode=97:0"


@pytest.mark.parametrize(
    ("accounting", "controller", "found"),
    [
        ("CANCELLED by 0|2026-01-01T01:00:00|n[1-2]|97:0\n", "", ["CANCELLED"]),
        (None, f"JobId=7 JobName=a JobState=TIMEOUT Reason=TimeLimit {ENDED}\n", ["TIMEOUT"]),
        (None, None, []),
    ],
)
def test_a_job_that_squeue_has_forgotten_is_asked_of_the_accounting_or_the_controller(
    monkeypatch, accounting, controller, found
):
    """Where none of them knows it, that is no error."""

    def answer(command, **_named):
        told = {"squeue": "", "sacct": accounting}.get(command[0], controller)
        if told is None:
            raise client.RefusedError(f"{command[0]}: Slurm accounting storage is disabled, or an invalid job id")
        return told

    monkeypatch.setattr(client, "run", answer)
    jobs = client.list_jobs("a", ["7"])
    assert [(each.job_id, each.state) for each in jobs] == [("7", state) for state in found]
    for each in jobs:
        assert (each.end_s, each.exit_code) == (client.parse_time("2026-01-01T01:00:00"), 97)
    assert client.list_jobs("a", []) == []


def test_gpus_that_the_cluster_does_not_know_are_explained(monkeypatch):
    refused = "sbatch: Batch job submission failed: Invalid generic resource (gres) specification"

    def answer(_command, **_named):
        raise client.RefusedError(refused)

    monkeypatch.setattr(client, "run", answer)
    with pytest.raises(client.RefusedError) as caught:
        client.submit_script("job.sh", {})
    line = f"{refused}: this cluster does"
    assert str(caught.value).startswith(line)
    assert "-cfg gpus=tres asks " in str(caught.value)
    refused = "sbatch: Invalid account"
    with pytest.raises(client.RefusedError, match=r"^sbatch: Invalid account$"):
        client.submit_script("job.sh", {})


def test_options_are_looked_up_in_the_help_of_a_command():
    text = "  -N, --nodes=N   number\n      --segment=size  a size\n      --kill-on-bad-exit[=0|1]\n"
    assert [client.has_option(text, flag) for flag in ("--nodes", "--segment", "--kill-on-bad-exit")] == [True] * 3
    assert not client.has_option(text, "--container-image")


@pytest.mark.parametrize(
    ("known", "track", "plugin", "waits"),
    [
        ("--wait-for-children", "proctrack/cgroup", "autodetect", True),
        ("--wait-for-children", "proctrack/cgroup", "cgroup/v1", False),
        ("--wait-for-children", "proctrack/linuxproc", "autodetect", False),
        ("--wait", "proctrack/cgroup", "autodetect", False),
    ],
)
def test_srun_waits_for_all_processes_of_a_task_where_it_can(monkeypatch, known, track, plugin, waits):
    config = f"SlurmUser = slurm(7)\nProctrackType           = {track}\n\nCgroup Support\nCgroupPlugin   = {plugin}\n"
    answers = {"srun": f"  -W, {known}  it waits\n", "scontrol": config}
    monkeypatch.setattr(client, "run", lambda command: answers[command[0]])
    client.read_help.cache_clear()
    assert client.can_wait_for_children() is waits
    client.read_help.cache_clear()


def test_a_program_that_cannot_be_run_is_a_line(tmp_path):
    with pytest.raises(EngineError, match="here: Permission denied"):
        client.run([str(tmp_path)])


def test_a_controller_that_restarts_is_asked_again_and_one_that_refuses_is_not(tmp_path, monkeypatch):
    program, asked = tmp_path / "squeue", tmp_path / "asked"
    program.write_text(f"#!/bin/sh\n[ -e {asked} ] && exec echo told\ntouch {asked}\necho $1 >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(client.time, "sleep", lambda _seconds: None)
    assert client.run([str(program), "Unable to contact slurm controller"]) == "told\n"
    asked.unlink()
    with pytest.raises(client.RefusedError, match="Invalid account"):
        client.run([str(program), "Invalid account"])
    asked.unlink()
    with pytest.raises(client.SlurmDownError, match="answer: Connection refused"):
        client.run([str(program), "Connection refused"], waits=False)


def test_a_script_does_not_send_what_another_user_has_put_in_its_place(tmp_path):
    """With a program `sbcast` that says what it would send."""
    source = tmp_path / "muster-train-x.7.0.zip.sent"
    source.mkdir()  # as a file that `rm -f` may not remove
    (source / "theirs").touch()
    lines = build(shared=False, node_dir=str(tmp_path)).script.replace("@PAYLOAD@", "")
    sbcast = tmp_path / "sbcast"
    sbcast.write_text("#!/bin/sh\necho sent\n")
    sbcast.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["sh", "-c", lines], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (97, "")


def test_a_folder_on_a_node_must_be_ours(tmp_path, capsys):
    mine, open_to_all, link = tmp_path / "mine", tmp_path / "open", tmp_path / "link"
    for _ in range(2):
        node._claim_folder(str(mine))
    assert mine.stat().st_mode & 0o777 == 0o700
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    link.symlink_to(mine)
    for path in (open_to_all, link):
        with pytest.raises(SystemExit, match="98"):
            node._claim_folder(str(path))
        assert "is another user's" in capsys.readouterr().err


def test_a_run_removes_what_earlier_ones_have_brought(tmp_path):
    names = ["muster-a.7.0.zip", "muster-a.7.1.zip", "muster-b.7.0.zip"]
    for name in names:
        (tmp_path / name).touch()
    node._remove_earlier(str(tmp_path / names[1]), str(tmp_path / "muster-a"))
    assert sorted(path.name for path in tmp_path.iterdir()) == names[1:]


def test_a_controller_that_restarts_at_the_end_of_a_run_is_asked_again(monkeypatch):
    answers = ["", "", "JobId=7 JobState=RUNNING\n"]
    monkeypatch.setattr(node, "_run", lambda *_words: answers.pop(0))
    monkeypatch.setattr(node.time, "sleep", lambda _seconds: None)
    env = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "n1"}
    assert node._read_state(Allocation.of(env)) == "RUNNING"


def test_the_controller_is_asked_less_and_less_often():
    asked, at_s = 0, 0.0
    for pause_s in list_pauses():
        asked, at_s = asked + 1, at_s + pause_s
        if at_s > 165:  # a grace period, and what Slurm may take
            break
    assert asked < 45


@pytest.mark.parametrize(
    ("probes", "states", "ends"),
    [
        (["", ""], ["RUNNING", "RUNNING"], True),
        (["", "lives"], ["RUNNING", "RUNNING"], False),
        ([], [""] * 5, False),
        ([], ["PENDING"], False),
        ([], ["COMPLETING"], False),
        ([""], ["RUNNING", "COMPLETING"], False),
    ],
)
def test_a_job_that_has_lost_its_script_is_ended_and_no_other(monkeypatch, tmp_path, probes, states, ends):
    """A step that fails once, or a controller that does not answer, is not the loss of the first node."""
    ran = []

    def answer(*words):
        ran.append(words[0])
        show = {"srun": lambda: probes.pop(0), "scontrol": lambda: f"JobState={states.pop(0)}", "scancel": str}
        return show[words[0]]()

    monkeypatch.setattr(node, "_run", answer)
    monkeypatch.setattr(node.time, "sleep", lambda _seconds: None)
    env = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}
    spec = build(build_role(nodes=2, least=1)).spec
    node._end_without_script(node.AppFolder(tmp_path), spec, Allocation.of(env))
    assert ("scancel" in ran) is ends
    assert (probes, states) == ([], []), "nothing is asked that does not matter"


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("1", 60),
        ("1:30", 90),
        ("0:02:00", 120),
        ("1-2", 93600),
        ("1-0:01", 86460),
        ("0-0:1:5", 65),
        ("UNLIMITED", None),
    ],
)
def test_times_of_slurm(time, seconds):
    assert _count_seconds(time) == seconds


def test_a_time_limit_without_a_step_is_refused():
    """It was queued again and again, and never did anything."""
    build(build_role(), time="0:02:00", grace_s=50.0)
    with pytest.raises(OptionError, match=r"time=0:01:00 .* 90 s: "):
        build(build_role(), time="0:01:00", grace_s=90.0)
