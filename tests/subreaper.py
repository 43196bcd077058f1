"""Runs one command below itself as subreaper, and tells what the command left behind.

    python subreaper.py REPORT_FD SETTLE_S COMMAND...

Every orphan of the command, even one that called setsid and emptied its environment, becomes a child of this process.
Lines of JSON on REPORT_FD: {"pid": n} once the command runs; {"status": n, "ended_s": monotonic seconds, "leftovers":
[[pid, name, command], ...]} when it has ended and what was still there after SETTLE_S seconds has been killed. The end
of file on standard input (the harness closed it, or died) kills everything at once.
"""

import ctypes
import json
import os
import select
import signal
import sys
import time

PR_SET_CHILD_SUBREAPER = 36


def list_processes() -> dict[int, tuple[int, str, str]]:
    """pid -> (parent's pid, state, name) of every process. /proc/<pid>/task/*/children is not in every kernel."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                stat = file.read()
        except OSError:
            continue  # it ended meanwhile
        name = stat[stat.index("(") + 1 : stat.rindex(")")]
        state, ppid = stat[stat.rindex(")") + 2 :].split()[:2]
        found[int(entry)] = (int(ppid), state, name)
    return found


def list_descendants(root: int) -> list[int]:
    """Living descendants (no zombies) of a process, oldest first."""
    processes = list_processes()
    children: dict[int, list[int]] = {}
    for pid, (ppid, _, _) in processes.items():
        children.setdefault(ppid, []).append(pid)
    found, todo = [], [root]
    while todo:
        for pid in children.get(todo.pop(), ()):
            todo.append(pid)
            if processes[pid][1] not in "ZX":
                found.append(pid)
    return sorted(found)


def describe(pid: int) -> tuple[int, str, str]:
    """pid, name, command line ("" when it is gone)."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            name = file.read().strip()
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            command = file.read().replace("\0", " ").strip()
    except OSError:
        return pid, "", ""
    return pid, name, command


def reap(statuses: dict[int, int]) -> None:
    """Take the exit statuses of all children that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        statuses[pid] = status


def main() -> None:
    report_fd, settle_s, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, lambda *_: None)  # those meant for the command's whole group reach it themselves

    def report(**record: object) -> None:
        os.write(report_fd, (json.dumps(record) + "\n").encode())

    pid = spawn(command, report_fd)
    report(pid=pid)
    statuses: dict[int, int] = {}
    control: list[int] = [0]
    ended_s = None
    while True:
        reap(statuses)
        now_s = time.monotonic()
        if pid in statuses:
            ended_s = ended_s or now_s
            if not list_descendants(os.getpid()) or now_s >= ended_s + settle_s:
                break
        ready, _, _ = select.select([wake_r, *control], [], [], 0.02 if ended_s else 1.0)
        if wake_r in ready:
            os.read(wake_r, 4096)
        if 0 in ready and not os.read(0, 4096):
            break
    leftovers = [describe(left) for left in list_descendants(os.getpid())]
    kill_descendants(statuses)
    report(status=statuses.get(pid), leftovers=leftovers, ended_s=ended_s)


def spawn(command: list[str], report_fd: int) -> int:
    """Start the command with default signal dispositions and without the harness's descriptors."""
    pid = os.fork()
    if pid:
        os.close(1)  # only the command and its children hold the pipes: their end of file means something
        os.close(2)
        return pid
    try:
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(signum, signal.SIG_DFL)
        os.close(report_fd)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"subreaper: {command[0]}: {error}\n".encode())
    os._exit(127)


def kill_descendants(statuses: dict[int, int]) -> None:
    """SIGKILL and reap until no process is left; new orphans come to us as their parents die."""
    while True:
        reap(statuses)
        alive = list_descendants(os.getpid())
        if not alive:
            break
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        select.select([], [], [], 0.005)
    reap(statuses)


if __name__ == "__main__":
    main()
