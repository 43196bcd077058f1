"""`muster doctor`: what is seen, the verdicts, and that a bug report holds no secret."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from muster.cli import overview
from muster.cli.commands import main
from muster.cli.doctor import command, services
from muster.cli.doctor.command import format_observations
from muster.cli.doctor.machine import Observation, Verdict, hide_credentials
from muster.schedulers.slurm.client import list_jobs
from muster.schedulers.slurm.scheduler import SlurmScheduler
from muster.schedulers.supervision.app_folder import AppFolder
from muster.schedulers.supervision.registry import AppRegistry


@pytest.fixture(autouse=True)
def quiet_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine, cluster or Slurm of this machine is asked."""
    for name in ("_look_at_docker", "_look_at_cluster", "_look_at_slurm"):
        absent = Observation(name=name, verdict=Verdict.ABSENT, text="not asked")
        monkeypatch.setattr(services, name, lambda _environ, absent=absent: absent)


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, dict]]:
    code = main(["doctor", "--json", *words])
    answer = json.loads(capsys.readouterr().out)
    return code, {each["name"]: each for each in answer["observations"]}


def test_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, seen = run_json(capsys, "--log-dir", str(tmp_path))
    assert code == 0
    expected = {"torch", "devices", "limits", "folders", "interfaces", "site checks", "variables"}
    assert expected < {*seen}
    assert seen["torch"]["facts"]["torch"]
    assert seen["folders"]["facts"]["folders"][0]["path"] == str(tmp_path)
    assert all(each["verdict"] in ("ok", "absent", "warning", "error") for each in seen.values())


def test_a_machine_with_amds_driver(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    exists = os.path.exists
    drivers = {"/dev/kfd": True, "/dev/nvidiactl": False, "/dev/dxg": False}
    monkeypatch.setattr(os.path, "exists", lambda path: drivers.get(str(path)) or exists(path))
    monkeypatch.delenv("MUSTER_NVML", raising=False)
    _, seen = run_json(capsys)
    assert seen["devices"]["text"].startswith("AMD's driver is"), seen["devices"]


def test_a_missing_driver_is_an_error_where_gpus_must_be_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: not str(path).startswith("/dev/") and exists(path))
    code, seen = run_json(capsys, "--devices", "8")
    said = "no driver of a GPU is loaded, expected 8 devices (--devices)"
    assert (code, seen["devices"]["verdict"], seen["devices"]["text"]) == (1, "error", said)


def test_a_missing_device_is_an_error_and_a_holder_keeps_its_words(
    nvml: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MUSTER_NVML", nvml)
    monkeypatch.setenv("STAND_IN_GPUS", "0:81604378624:85899345920,0:0:85899345920")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with subprocess.Popen(["sleep", "600", "0.0625"]) as holder:
        try:
            monkeypatch.setenv("STAND_IN_HOLDER", str(holder.pid))
            while not Path(f"/proc/{holder.pid}/cmdline").read_bytes():
                pass  # exec closes what Popen waits for before it sets the command line
            code, seen = run_json(capsys, "--devices", "3")
            assert (code, seen["devices"]["verdict"]) == (1, "error")
            text = seen["devices"]["text"]
            assert "2 devices answer, expected 3 (--devices)" in text
            assert f"by process {holder.pid} of " in text
            assert ": sleep)" in text
            assert "0.0625" not in json.dumps(seen["devices"])
            assert "out of service" in seen["devices"]["advice"]
            assert main(["doctor"]) == 0  # a warning
        finally:
            holder.kill()


def test_a_bug_report_has_names_of_variables_and_no_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MUSTER_TOKEN", "s3cr3t" * 6)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    assert main(["doctor", "--json"]) == 0
    text = capsys.readouterr().out
    assert "MUSTER_TOKEN" in text
    assert "NCCL_DEBUG" in text
    assert "s3cr3t" not in text


def test_addresses_lose_their_credentials() -> None:
    assert hide_credentials("tcp://ada:pw@host:2375 and https://host/a@b") == "tcp://host:2375 and https://host/a@b"
    assert hide_credentials("(https://host/x?token=s3cr3t) at '//h:1?a=b'") == "(https://host/x) at '//h:1'"


def test_a_cluster_that_does_not_answer_is_one_line_without_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    configured = {
        "clusters": [{"name": "c", "cluster": {"server": "https://ada:s3cr3t@127.0.0.1:1/x?token=s3cr3t"}}],
        "users": [{"name": "u", "user": {"token": "s3cr3t"}}],
        "contexts": [{"name": "k", "context": {"cluster": "c", "user": "u"}}],
    }
    (tmp_path / "config").write_text(json.dumps({"kind": "Config", "current-context": "k", **configured}))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    seen = services._look_at_cluster({})
    assert "https://127.0.0.1:1/x does not answer" in seen.text
    assert "s3cr3t" not in json.dumps(seen.to_json())


def test_a_sites_checks_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "check").write_text("#!/bin/sh\necho 'error: the fabric is down'\n")
    (tmp_path / "check").chmod(0o755)
    monkeypatch.setenv("MUSTER_PREFLIGHT_DIR", str(tmp_path))
    code, seen = run_json(capsys)
    assert (code, seen["site checks"]["verdict"], seen["site checks"]["text"]) == (
        1,
        "error",
        "check: the fabric is down",
    )


@pytest.mark.parametrize(("name", "line"), [("gone", "is not here"), ("", "has no executable file")])
def test_a_folder_of_checks_that_was_named_and_has_none_is_a_warning(
    name: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    (tmp_path / "check").write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("MUSTER_PREFLIGHT_DIR", str(tmp_path / name))
    code, seen = run_json(capsys)
    assert (code, seen["site checks"]["verdict"]) == (0, "warning")
    assert seen["site checks"]["text"].endswith(f"(MUSTER_PREFLIGHT_DIR) {line}")


def test_what_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_environ: object) -> Observation:
        raise RuntimeError("https://ada:pw@host said\nno")

    monkeypatch.setattr(services, "_look_at_docker", fail)
    code, seen = run_json(capsys)
    assert code == 0
    assert seen["Docker"]["text"] == "cannot be asked: RuntimeError: https://host said no"


def test_lines_are_folded_below_their_text() -> None:
    seen = Observation(name="limits", verdict=Verdict.WARNING, text="a few words of it", advice="raise it")
    assert format_observations([seen], 40) == [
        "limits        warning  a few words of it",
        "                       -> raise it",
    ]


# -- Slurm -------------------------------------------------------------------------------------------------------------


def test_slurms_controller_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    sinfo = tmp_path / "sinfo"
    for body, verdict, text in (
        ('[ "$1" = --version ] && echo slurm 24.05 || echo "gpu* "', Verdict.OK, "slurm 24.05, partitions gpu*"),
        (
            '[ "$1" = --version ] && echo slurm 24.05 || { echo no >&2; exit 1; }',
            Verdict.WARNING,
            "slurm 24.05: sinfo: no",
        ),
        ("echo no >&2; exit 1", Verdict.WARNING, "its version is not known: sinfo: no"),
        (
            "echo 'sinfo: fatal: Could not establish a configuration source' >&2; exit 1",
            Verdict.ABSENT,
            "no cluster is configured: Slurm's commands are here, but no slurm.conf; set SLURM_CONF to its path",
        ),
    ):
        sinfo.write_text(f"#!/bin/sh\n{body}\n")
        sinfo.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        seen = services._look_at_slurm({"PATH": os.environ["PATH"]})
        assert (seen.verdict, seen.text) == (verdict, text)


@pytest.mark.parametrize("is_installed", [True, False])
def test_doctor_and_list_say_the_same_of_a_slurm_that_is_not_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_installed: bool
) -> None:
    """One called it absent, the other not reachable, each in its own words."""
    monkeypatch.undo()
    for name in ("sinfo", "squeue") if is_installed else ():
        program = tmp_path / name
        program.write_text("#!/bin/sh\necho 'fatal: Could not establish a configuration source' >&2; exit 1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if is_installed else str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(overview, "list_properties", lambda: ["slurm"])
    assert main(["list"]) == 0
    assert capsys.readouterr().err == "", "no job was ever submitted to it from here"
    monkeypatch.setattr(SlurmScheduler, "list_apps", lambda self, cfg: list_jobs("job", ()))
    folder = AppFolder(tmp_path / "job-1")
    folder.state_dir.mkdir(parents=True)
    folder.spec_file.touch()
    AppRegistry(tmp_path / "muster", "slurm").add("job-1", folder.path)
    assert main(["list"]) == 0
    said = capsys.readouterr().err
    seen = services._look_at_slurm({})
    assert seen.verdict is Verdict.ABSENT
    text = seen.text.replace("sinfo", "squeue")  # the command that is not there
    assert said == f"muster: slurm: {text}\n"


def test_the_command_prints_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.diagnose(nproc=None, devices=None, log_dir=None, as_json=False) == 0
    assert capsys.readouterr().out.startswith("torch         ok       muster ")
