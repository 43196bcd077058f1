"""What an agent loads before the first line of the user's script: each module delays the first worker."""

import contextlib
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import Tree, run_tree

AGENT = [sys.executable, "-v", "-m", "muster.agent", "--standalone", "--nproc-per-node", "2"]
PROGRAM = """
import signal, sys
print("FIRST" + "LINE", file=sys.stderr, flush=True)
signal.pause()  # the imports at the end do not count
"""


def list_loaded(folder: Path, *flags: str) -> list[str]:
    """The modules that are loaded before the first line, of all packages."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    with Tree([*AGENT, *flags, str(script)], cwd=folder) as tree:
        tree.wait_for_line("FIRSTLINE", stream="stderr")
        before = tree.stderr.partition("FIRSTLINE")[0]
    return sorted(set(re.findall(r"import '([\w.]*)'", before)))


@pytest.mark.parametrize(("flags", "used"), [((), {"preflight"}), (("--preflight", "off"), set())])
def test_a_job_that_uses_no_feature_loads_none(flags: tuple[str, ...], used: set[str], tmp_path: Path) -> None:
    """The checks before the start are on unless they are switched off."""
    loaded = list_loaded(tmp_path, *flags)
    assert "muster.agent.node.supervisor" in loaded  # the pattern still matches what -v prints
    features = {found[1] for name in loaded if (found := re.search(r"\.features\.(\w+)\.(node|sink)$", name))}
    assert features - ({"trainer"} if find_spec("transformers") else set()) == used
    for option in ("workers.run_names", "agent.hold", "cli.help_text"):
        assert not [name for name in loaded if option in name], "who does not ask for it does not pay for it"


def read_held(pid: int) -> str:
    """What a process has mapped and open; "": it has ended."""
    lines = []
    with contextlib.suppress(OSError):
        lines.append(Path(f"/proc/{pid}/maps").read_text())
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                lines.append(os.readlink(link))
    return "\n".join(lines)


def test_nothing_heavy_is_loaded_and_without_a_driver_nothing_that_is_about_devices(tmp_path: Path) -> None:
    """Neither before the workers, nor by telemetry, the watch for hangs and a restart."""
    if any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))):
        pytest.skip("this machine has devices")
    script = "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 1; echo AT=$NCCL_RAS_ADDR; sleep 3"
    flags = ["--max-restarts", "1", "--hang-timeout", "2", "--hang-action", "report", "--no-python", "sh", "-c", script]
    env = {name: value for name, value in os.environ.items() if name != "NCCL_RAS_ADDR"}
    with Tree([*AGENT, *flags], cwd=tmp_path, env=env) as tree:
        tree.wait_for_line("AT=")
        held = "".join(map(read_held, [tree.pid, *tree.descendants()]))
        outcome = tree.wait()
    assert re.findall(r"AT=(.*)", outcome.stdout) == ["", ""], "no port is reserved for NCCL's monitor"
    assert "libc" in held, "what is mapped and open was read"
    assert re.findall(r"\S*(?:nvidia|librocm|libcuda|/dev/kfd)\S*", held) == []
    loaded = set(re.findall(r"import '([\w.]*)'", outcome.stderr))
    assert {"muster.agent.telemetry.plane", "muster.agent.features.hangs.servers"} <= loaded, outcome.exit_code
    about = ("devices", "gpus", "monitor", "launches", "segments")
    assert [name for name in loaded if name.startswith("muster.") and name.rpartition(".")[2] in about] == []
    heavy = {"dataclasses", "inspect", "statistics", "tempfile", "hashlib", "encodings.idna"}
    assert not heavy & loaded, "each takes up to 4 MB, and several ms"


def test_an_agent_that_tells_kubernetes_of_its_job_loads_one_module_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_JOB_OBJECT", "/apis/batch/v1/namespaces/team/jobs/app-x1-main")
    monkeypatch.setenv("MUSTER_ACCOUNT_DIR", str(tmp_path))
    loaded = list_loaded(tmp_path)
    assert "muster.agent.features.job_object.sink" in loaded
    assert not {"ssl", "http.client"} & {*loaded}


def test_a_failure_is_reported_when_descriptors_run_out(tmp_path: Path) -> None:
    """The modules that describe a failure are loaded then, and an import needs a descriptor."""
    (tmp_path / "program.py").touch()
    agent = [*AGENT[:1], *AGENT[2:], "--start", "cold", "--tee", "3", "--log-dir", str(tmp_path / "logs"), "program.py"]
    # The agent's own descriptors, two for what its threads open meanwhile, and fewer than two workers' pipes and files.
    for limit in range(30, 36):
        command = ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *agent]
        outcome = run_tree(command, cwd=tmp_path).check(1)
        assert "open files; no " in " ".join(outcome.stderr.split()), f"{limit}: {outcome.explain()}"
