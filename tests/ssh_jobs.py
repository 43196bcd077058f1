"""What tests of ssh look at: processes, links, states and logs of apps."""

from pathlib import Path

from harness import find_processes, wait_until
from torchx.specs import AppState

from muster._shared import processes
from muster.cli.commands import main
from muster.schedulers.adapter import ReplicaId
from muster.testing.contract_apps import ROLE


def find_link(scheduler, app_id: str, index: int) -> int:
    return scheduler.find_folder(app_id).read_record().handles[ReplicaId(ROLE, index)]["pid"]


def find_ssh(link: int) -> int:
    """The connection of a link: its child, or one that the submission has given it."""
    found: list[int] = []

    def find() -> bool:
        given = [line.split()[1] for path in Path(f"/proc/{link}/fdinfo").iterdir() for line in _read_pid_lines(path)]
        pids = [*processes.list_descendants(link), *map(int, given)]
        found[:] = [pid for pid in pids if pid > 0 and (processes.read_stat(pid) or "Z")[0] != "Z"]
        found[:] = [pid for pid in found if b"ssh\0-F" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return bool(found)

    wait_until(find, what="the link has a connection")
    return found[0]


def _read_pid_lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text().splitlines() if line.startswith("Pid:")]
    except OSError:
        return []  # it was closed


def read_shell(capsys, *words: str) -> str:
    """What a command of muster prints."""
    capsys.readouterr()
    main([*words])
    return capsys.readouterr().out


def wait_state(scheduler, app_id: str, state: AppState):
    wait_until(lambda: scheduler.describe(app_id).state is state, what=state.name)
    return scheduler.describe(app_id)


def read(scheduler, app_id: str, index: int) -> list[str]:
    return list(scheduler.log_iter(app_id, ROLE, index))


def wait_text(scheduler, app_id: str, text: str, index: int, times: int = 1) -> None:
    try:
        wait_until(
            lambda: "".join(read(scheduler, app_id, index)).count(text) >= times,
            what=f"{times} times {text} in the log of {index}",
        )
    except AssertionError as error:
        told = scheduler.describe(app_id)
        raise AssertionError(f"{error}; {told and told.msg}; its log: {read(scheduler, app_id, index)}") from error


def wait_gone(runs: Path) -> None:
    wait_until(lambda: not list(runs.iterdir()), what="no run folder is left")
    wait_until(lambda: not find_processes(str(runs)), what="no process is left")
