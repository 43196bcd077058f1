"""`muster exec` and `muster shell` on jobs of local_cwd, with real processes and terminals."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager

import pytest
from control_jobs import muster, unknown_line
from harness import LIMIT_S, PROGRAMS, find_processes, wait_until
from terminal import TerminalProgram

from muster.components import dist
from muster.schedulers.local import create_detached_scheduler

PROGRAM = PROGRAMS / "says_environment.py"
OF_ONE_PROCESS = {
    *("MUSTER_STATUS_PAGE", "MUSTER_SNAPSHOTS", "MUSTER_STACK_FILE", "MUSTER_WATCHED"),
    *("TORCHELASTIC_ERROR_FILE", "PYTHONBREAKPOINT"),
}
PRINT = "import json, os; print(json.dumps(dict(os.environ)))"


class Job:
    """A job of two nodes with one worker each, which wait."""

    def __init__(self, folder, scheduler, app_id):
        self.folder = folder
        self.handle = f"detached://torchx/{app_id}"
        self.env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "TERM": "xterm"}
        self.scheduler, self.app_id = scheduler, app_id

    def begin(self, *words, **more):
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-m", "muster", words[0], self.handle, *words[1:]]
        return subprocess.Popen(command, env=self.env, text=True, **{**pipes, **more})

    def run(self, *words, text=None):
        process = self.begin("exec", *words, stdin=subprocess.DEVNULL if text is None else subprocess.PIPE)
        output, errors = process.communicate(text, timeout=LIMIT_S)
        return process.returncode, output, errors

    def read_worker(self, rank):
        return json.loads((self.folder / f"{rank}.json").read_text())


@contextmanager
def start_job(folder, start):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("OF_THE_JOB", "it's here")
        patch.chdir(folder)
        with closing(create_detached_scheduler("torchx")) as scheduler:
            app = dist.ddp(str(folder), script=str(PROGRAM), j="2x1", name="job", start=start)
            app_id = scheduler.submit(app, {})
            try:
                patch.delenv("OF_THE_JOB")
                wait_until(lambda: len(list(folder.glob("*.json"))) == 2, what="the workers")
                yield Job(folder, scheduler, app_id)
            finally:
                scheduler.delete(app_id)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    with start_job(tmp_path_factory.mktemp("exec"), "auto") as made:
        yield made


def wait_gone(mark):
    wait_until(lambda: not find_processes(mark), what=f"the end of {mark}")


def compare_environment(job, rank):
    """Beside those of one process."""
    code, output, errors = job.run("--node", str(rank), sys.executable, "-c", PRINT)
    assert code == 0, errors
    told, worker = json.loads(output), job.read_worker(rank)
    assert told == {name: value for name, value in worker.items() if name not in OF_ONE_PROCESS}
    assert told["OF_THE_JOB"] == "it's here"
    assert told["RANK"] == str(rank)
    assert "MUSTER_TOKEN" not in told


def test_the_variables_are_those_of_a_warm_worker_of_the_node(job):
    compare_environment(job, 0)
    compare_environment(job, 1)


@pytest.mark.long
def test_the_variables_are_those_of_a_cold_worker_of_the_node(tmp_path):
    with start_job(tmp_path / "job", "cold") as cold:
        compare_environment(cold, 1)


def test_output_input_exit_code_and_folder_are_the_commands(job):
    script = "read line; echo got $line in $PWD; echo wrong >&2; exit 7"
    assert job.run("sh", "-c", script, text="a line\n") == (7, f"got a line in {job.folder}\n", "wrong\n")
    assert job.run("--", "sh", "-c", "kill -TERM $$") == (143, "", "")
    assert job.run("no-such-program")[0] == 127
    assert job.run("/etc/passwd")[0] == 126


def test_all_nodes_have_prefixes_and_those_that_fail_are_named(job):
    script = "cat; echo rank $RANK; printf last >&2; exit $((RANK * 5))"
    code, output, errors = job.run("--all", "sh", "-c", script, text="given\n")
    assert code == 5
    output, errors = (text.replace("says_environment/", "n/") for text in (output, errors))
    assert sorted(output.splitlines()) == ["n/0 given", "n/0 rank 0", "n/1 given", "n/1 rank 1"]
    assert sorted(errors.splitlines()) == [
        "muster: 1 of 2 nodes failed: n/1 (exited with code 5)",
        *("n/0 last", "n/1 last"),
    ]


@pytest.mark.parametrize(
    ("signum", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.long), (signal.SIGTERM, 143)]
)
def test_a_signal_ends_the_command(job, signum, code):
    mark = f"{signum.name}-{os.getpid()}"
    process = job.begin("exec", "--all", sys.executable, "-c", "import time; time.sleep(600)", mark)
    wait_until(lambda: len(find_processes(mark)) == 3, what="two commands")
    process.send_signal(signum)
    _, errors = process.communicate(timeout=LIMIT_S)
    if signum == signal.SIGTERM:  # Python itself may print a traceback at SIGINT and end with 1
        assert process.returncode == code, errors
    assert process.returncode in (code, 1), errors
    assert find_processes(mark) == []


@pytest.mark.long
def test_a_second_signal_kills_what_does_not_end(job):
    mark = f"stubborn-{os.getpid()}"
    process = job.begin("exec", "sh", "-c", "trap '' INT; echo ready; sleep 600 & wait; wait", mark)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)  # two that arrive together are one
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 137
    process.communicate()
    assert find_processes(mark) == []


@pytest.mark.parametrize("how", ["kill -9", "a closed pipe"])
def test_nothing_is_left_by(job, how):
    mark = f"{how}-{os.getpid()}"
    trap = "(sleep 600; true) & trap '' TERM; " if how == "kill -9" else ""
    process = job.begin("exec", "sh", "-c", f"{trap}sleep 600; true", mark)
    wait_until(lambda: len(find_processes(mark)) > 1, what="the command")
    if how == "kill -9":
        process.kill()
        process.communicate()
    else:
        process.stdout.close()  # nothing is written, and it is seen
        assert (process.wait(LIMIT_S), process.stderr.read()) == (128 + signal.SIGPIPE, "")
        process.stderr.close()
    wait_gone(mark)


@pytest.mark.long
def test_what_a_command_leaves_in_the_background_ends_with_it(job):
    mark = f"background-{os.getpid()}"
    code, output, _ = job.run("sh", "-c", 'sh -c "sleep 600; true" "$1" & echo done', "sh", mark)
    assert (code, output) == (0, "done\n")
    assert find_processes(mark) == []


def test_wrong_requests_are_one_line(job, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", job.env["XDG_STATE_HOME"])
    for words, code, line in (
        (("exec", "--node", "2", "true"), 255, f"no node 2 of {job.app_id} runs: it has 2 nodes, counted from 0"),
        (("shell",), 2, "a shell needs a terminal: `muster exec` runs a command without one"),
    ):
        done = muster(words[0], job.handle, *words[1:])
        assert (done.code, done.stdout, done.stderr) == (code, "", f"muster: {line}\n")
    assert muster("exec", job.handle).code == 2


@pytest.mark.long
def test_a_job_that_has_ended_or_a_node_that_is_lost_is_one_line(tmp_path):
    with start_job(tmp_path / "job", "cold") as lost:
        mark = f"lost-{os.getpid()}"
        process = lost.begin("exec", "--node", "1", "sh", "-c", "echo ready; sleep 600; true", mark)
        assert process.stdout.readline() == "ready\n"
        lost.scheduler.cancel(lost.app_id)
        wait_until(lambda: lost.scheduler.describe(lost.app_id).state.name == "CANCELLED", what="its end")
        code, printed, said = lost.run("true")
        assert (code, printed, " is CANCELLED" in said) == (255, "", True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 143
        process.communicate()
        lost.scheduler.delete(lost.app_id)
        assert lost.run("true") == (255, "", unknown_line("detached", lost.app_id))


# -- shell ------------------------------------------------------------------------------------------------------------


@contextmanager
def open_shell(job, *words):
    env = {**job.env, "SHELL": "/bin/sh"}
    command = [sys.executable, "-m", "muster", "shell", job.handle, *words]
    with TerminalProgram(command, env=env, cwd=job.folder, has_keys=True) as shell:
        yield shell


def test_a_shell_has_a_terminal_of_the_same_size_and_this_one_is_restored(job):
    with open_shell(job, "1") as shell:
        before = shell.settings
        shell.type("echo rank=$RANK; tty; stty size\n")
        shell.expect("rank=1")
        shell.expect("40 120")
        assert shell.settings != before
        shell.resize(33, 99)
        wait_until(lambda: ask_size(shell) == "33 99", what="the new size")
        shell.type("sleep 600\n")
        time.sleep(0.2)
        shell.type("\x03")  # for the command in it, not for `muster shell`
        shell.type("echo inter''rupted; exit 9\n")
        shell.expect("interrupted")
        shell.finish(9)


def ask_size(shell):
    shell.type("echo size `stty size` .\n")
    shell.expect("size ")
    while " ." not in shell.text.rpartition("size ")[2]:
        shell.read_more()
    return shell.text.rpartition("size ")[2].partition(" .")[0]


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_shell_that_is_told_to_end_leaves_nothing(job, signum):
    """And the terminal is as it was, if it was told in a way that it can hear."""
    with open_shell(job) as shell:
        mark = f"in-shell-{os.getpid()}-{signum.name}"
        shell.type(f"sh -c 'echo rea''dy; trap \"\" HUP; sleep 600; true' {mark}\n")
        shell.expect("ready")
        shell.send(signum)
        if signum == signal.SIGKILL:
            shell.wait()
        else:
            shell.expect(f"the shell was ended by {signum.name}")
            shell.finish(255)
        wait_gone(mark)
