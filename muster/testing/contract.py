"""What every adapter must do, as tests. Each test waits for what it looks at, and expects no duration."""

import json
import pkgutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import pytest
from torchx.runner import Runner
from torchx.specs import AppDef, AppState, is_terminal

from muster.schedulers.adapter import (
    AskKind,
    AskOutcome,
    Code,
    CommandExit,
    ControlError,
    EngineError,
    PluginScheduler,
    SchedulerError,
    dump_app,
)
from muster.testing.contract_apps import (
    COUNTS,
    FAILS_TWICE,
    FAULTS,
    FIND,
    ROLE,
    RULES,
    WAITS,
    build_agents,
    build_critical_role,
    build_roles,
    build_shell,
)
from muster.testing.shell import split_step

T = TypeVar("T")
_POLL_S: Final = 0.05


def _find_ports(count: int) -> list[int]:
    """Return ports that were free."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


class SchedulerContract:
    """The tests that every adapter must pass. A subclass says how its scheduler is made, and how a replica is lost.

    To leave out a test that takes too long, a subclass replaces it by None.
    """

    factory: ClassVar[str] = ""
    """`package.module:function`, as in the entry point. It is called in this process and in others."""
    cfg: ClassVar[Mapping[str, Any]] = {}
    """Options of every submission. The apps must outlive the command that submits them."""
    image: ClassVar[str] = ""
    """The image of every role. It has `sh` and, for agents, a `python3`."""
    limit_s: ClassVar[float] = 90.0
    """The longest time that a test waits for one thing, in seconds."""
    steps: ClassVar[tuple[str, ...]] = (
        "muster.schedulers.supervision.app_folder:AppFolder.create",
        "muster.schedulers.supervision.client:start_supervisor",
    )
    """Functions that a submission calls, as `package.module:function` or `...:Class.method`.

    A command is killed at each of them, and a submission fails at the last one. These are those of every
    `SupervisedScheduler`.
    """

    # -- what a subclass defines ------------------------------------------------------------------------------------

    def lose_replica(self, scheduler: PluginScheduler, app_id: str, index: int) -> None:
        """End replica `index` of the role as the loss of its machine would, without a request."""
        raise NotImplementedError(f"{type(self).__name__} does not say how a replica is lost")

    def list_left(self, app_id: str) -> list[str]:
        """Name what is left of an app that has been deleted, or of which nothing was to be made."""
        del app_id
        return []

    def sweep(self, scheduler: PluginScheduler) -> None:
        """Remove what commands that were killed have left, as `muster prune` does."""
        for leftover in scheduler.find_leftovers():
            leftover.remove()

    # -- what the tests share -----------------------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def _own_state(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "state").mkdir(exist_ok=True)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        self._folder = tmp_path

    @pytest.fixture
    def scheduler(self, _own_state: None) -> Iterator[PluginScheduler]:
        """Return the scheduler. Apps that are left at the end are deleted."""
        with closing(self.create()) as made:
            yield made
            for each in made.list(self.cfg):
                if each.app_id.rpartition(":")[2].startswith("contract"):
                    made.delete(each.app_id)

    def create(self) -> PluginScheduler:
        """Make a scheduler as TorchX does."""
        made: PluginScheduler = pkgutil.resolve_name(self.factory)("contract")
        return made

    def wait(self, check: Callable[[], T], what: str) -> T:
        """Repeat a check until its result is true, and return the result."""
        deadline_s = time.monotonic() + self.limit_s
        while not (found := check()):
            assert time.monotonic() < deadline_s, f"{what}: not within {self.limit_s:g} s"
            time.sleep(_POLL_S)
        return found

    def wait_for(self, scheduler: PluginScheduler, app_id: str, state: AppState) -> Any:
        """Wait until an app has a state, and return its description. Another state that is final is a failure."""

        def find() -> Any:
            found = scheduler.describe(app_id)
            assert found is not None, f"{app_id} is not known any more"
            wrong = is_terminal(found.state) and found.state != state
            assert not wrong, f"{found.state.name}, not {state.name}: {found.msg}\n{self.read(scheduler, app_id)}"
            return found if found.state == state else None

        return self.wait(find, f"{app_id} becomes {state.name}")

    def read(self, scheduler: PluginScheduler, app_id: str, index: int = 0, **wanted: Any) -> str:
        """Return the log of a replica as it is now."""
        return "".join(scheduler.log_iter(app_id, ROLE, index, **wanted))

    def wait_line(self, scheduler: PluginScheduler, app_id: str, text: str, index: int = 0, times: int = 1) -> None:
        """Wait until a text is this many times in the log of a replica."""
        self.wait(
            lambda: self.read(scheduler, app_id, index).count(text) >= times,
            f"{text!r} ({times}x) in the log of {ROLE}/{index}",
        )

    def shell(self, *words: str) -> str:
        """Run a verb of `muster.testing.shell` in another process, and return what it prints."""
        done = self.begin(*words)
        output, errors = done.communicate(timeout=self.limit_s)
        assert done.returncode == 0, errors
        return output

    def begin(self, *words: str) -> "subprocess.Popen[str]":
        """Start a verb of `muster.testing.shell`."""
        return subprocess.Popen(
            [sys.executable, "-m", "muster.testing.shell", self.factory, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def submit(self, scheduler: PluginScheduler, app: AppDef) -> str:
        """Submit an app, and return its id."""
        app_id: str = scheduler.submit(app, self.cfg)
        return app_id

    # -- from submission to deletion ----------------------------------------------------------------------------------

    def test_an_app_runs_ends_and_is_deleted(self, scheduler: PluginScheduler) -> None:
        """Read status, list and log of an app that has ended, delete it, and check that nothing is left."""
        app_id = self.submit(scheduler, build_shell("echo out; echo err >&2", replicas=2, image=self.image))
        described = self.wait_for(scheduler, app_id, AppState.SUCCEEDED)
        assert [(role.role, [each.state.name for each in role.replicas]) for role in described.roles_statuses] == [
            (ROLE, ["SUCCEEDED", "SUCCEEDED"])
        ]
        assert [role.name for role in described.roles] == [ROLE]
        assert self._list(scheduler)[app_id] == "SUCCEEDED"
        scheduler.wait_ended(app_id, self.limit_s)  # at once: it has
        facts = scheduler.read_facts(app_id)
        assert facts is not None
        assert (facts.state, facts.restarts) == (AppState.SUCCEEDED, 0)
        for index in range(2):
            assert sorted(self.read(scheduler, app_id, index).splitlines()) == ["err", "out"]
        assert self.read(scheduler, app_id, 1, regex="^o") == "out\n"
        with pytest.raises(SchedulerError):
            self.read(scheduler, app_id, 2)
        scheduler.delete(app_id)
        assert scheduler.describe(app_id) is None
        assert app_id not in self._list(scheduler)
        self.wait(lambda: not self.list_left(app_id), "what it has left goes")
        scheduler.delete(app_id)  # again, and of an unknown app
        scheduler.cancel(app_id)
        with pytest.raises((SchedulerError, EngineError)):
            self.read(scheduler, app_id)

    def test_what_an_app_has_left_is_found_once_it_has_ended(self, scheduler: PluginScheduler) -> None:
        """Check that `muster prune` removes what an ended app has left, and nothing of a running app."""
        if type(scheduler).find_leftovers is PluginScheduler.find_leftovers:
            pytest.skip("apps leave nothing that this machine could find")
        ended = self.submit(scheduler, build_shell("true", image=self.image))
        running = self.submit(scheduler, build_shell("echo started; exec sleep 600", image=self.image))
        self.wait_for(scheduler, ended, AppState.SUCCEEDED)
        self.wait_line(scheduler, running, "started")
        left = {each.name: each for each in scheduler.find_leftovers()}
        assert f"{scheduler.backend}://{running}" not in left
        found = left[f"{scheduler.backend}://{ended}"]
        assert found.ended_s is not None
        assert found.size_bytes > 0
        assert "succeeded" in found.what
        found.remove()
        assert scheduler.describe(ended) is None
        assert f"{scheduler.backend}://{ended}" not in {each.name for each in scheduler.find_leftovers()}
        scheduler.delete(running)
        self.wait(lambda: not self.list_left(ended), "what it has left goes")

    def test_another_shell_sees_and_ends_it(self, scheduler: PluginScheduler) -> None:
        """Check that other processes know the app, and read its log while it is written."""
        app_id = self.submit(scheduler, build_shell(WAITS, image=self.image))
        followed = iter(scheduler.log_iter(app_id, ROLE, 0, should_tail=True))
        assert next(followed) == "started\n", "while it runs"
        self.wait_for(scheduler, app_id, AppState.RUNNING)
        listed = ("list", json.dumps(dict(self.cfg)))
        told = self.shell("describe", app_id, "--", *listed, "--", "log", app_id, ROLE, "0", "--", "cancel", app_id)
        state, apps, *lines = told.splitlines()
        assert (state, json.loads(apps)[app_id], lines) == ("RUNNING", "RUNNING", ["started"])
        assert [line for line in followed if not line.startswith("[muster]")] == [], "following ends with the app"
        self.wait_for(scheduler, app_id, AppState.CANCELLED)
        self.shell("delete", app_id)
        assert scheduler.describe(app_id) is None
        runner = Runner("contract", {scheduler.backend: lambda _name, **_more: scheduler})
        status = runner.wait(f"{scheduler.backend}://contract/{app_id}")
        assert status is not None, "`torchx run --wait` prints a traceback"
        assert status.state == AppState.CANCELLED
        assert status.msg.startswith(f"{app_id} no longer exists: ")
        assert runner.wait(f"{scheduler.backend}://contract/{app_id}x") is None, "this process has never seen it"

    def test_a_cancel_during_the_start_ends_it(self, scheduler: PluginScheduler) -> None:
        """Check that nothing runs on, whatever had started by the time of the cancel."""
        app_id = self.submit(scheduler, build_shell(WAITS, replicas=3, image=self.image))
        scheduler.cancel(app_id)
        described = self.wait_for(scheduler, app_id, AppState.CANCELLED)
        states = [each.state for role in described.roles_statuses for each in role.replicas]
        assert AppState.RUNNING not in states
        with pytest.raises(ControlError):
            scheduler.stop_app(app_id, 5.0)

    # -- failures -----------------------------------------------------------------------------------------------------

    def test_a_replica_that_fails_is_started_again_until_no_retry_is_left(self, scheduler: PluginScheduler) -> None:
        """Check that a follower reads all starts, each line once, and that the app then fails and says why."""
        app_id = self.submit(scheduler, build_shell("echo started; sleep 0.5; exit 3", image=self.image, retries=1))
        followed = list(scheduler.log_iter(app_id, ROLE, 0, should_tail=True))
        assert followed == ["started\n", "started\n"]
        described = self.wait_for(scheduler, app_id, AppState.FAILED)
        assert described.num_restarts == 1
        assert "3" in described.msg, f"its exit code is not said: {described.msg}"
        assert self.read(scheduler, app_id).count("started") == 2, "both, of a replica that has ended"

    def test_roles_end_and_are_started_again_as_their_policies_say(self, scheduler: PluginScheduler) -> None:
        """Watch one that is not critical fail, and one that always comes back end with the role that it serves."""
        app_id = self.submit(scheduler, build_roles(*_find_ports(1), image=self.image))
        self.wait(lambda: self._count_restarts(scheduler, app_id, "helper"), "the restarts of `helper` are counted")
        described = self.wait_for(scheduler, app_id, AppState.SUCCEEDED)
        states = {role.role: role.replicas[0].state.name for role in described.roles_statuses}
        assert states == {ROLE: "SUCCEEDED", "helper": states["helper"], "fails": "FAILED"}
        assert states["helper"] in ("CANCELLED", "SUCCEEDED", "FAILED"), "as it ended"
        assert "role fails has failed, which is not critical" in described.msg
        assert self.read(scheduler, app_id).count("server started") == 1, "the others' ends did not touch it"

    def test_a_critical_role_that_fails_ends_the_others_within_their_grace(self, scheduler: PluginScheduler) -> None:
        """Watch a role that ends when it is told to, and one that is killed after its own second."""
        app_id = self.submit(scheduler, build_critical_role(_find_ports(2), image=self.image))
        with ThreadPoolExecutor() as followers:
            follow = partial(scheduler.log_iter, app_id, should_tail=True)
            logs = [followers.submit(lambda role: list(follow(role)), role) for role in (ROLE, "deaf")]
            described = self.wait_for(scheduler, app_id, AppState.FAILED)
        assert "fails" in described.msg
        for log in logs:
            told = "told to end\n" in log.result()  # perhaps again with the kill
            assert told or scheduler.properties.loses_files, f"it was not told politely: {log.result()}"

        def has_ended() -> bool:
            found = scheduler.describe(app_id)
            states = [] if found is None else [role.replicas[0].state for role in found.roles_statuses]
            return AppState.RUNNING not in states

        self.wait(has_ended, "no role runs")

    def test_a_lost_replica_is_replaced(self, scheduler: PluginScheduler) -> None:
        """Check that a lost replica is replaced while the others run on."""
        app_id = self.submit(scheduler, build_shell(WAITS, replicas=2, image=self.image, retries=1))
        for index in range(2):
            self.wait_line(scheduler, app_id, "started", index)
        self.lose_replica(scheduler, app_id, 1)
        self.wait_line(scheduler, app_id, "started", 1, times=2)
        described = self.wait_for(scheduler, app_id, AppState.RUNNING)
        assert described.num_restarts <= 1, "a scheduler may replace it without a retry"
        assert self.read(scheduler, app_id, 0).count("started") == 1

    def test_a_submission_that_fails_leaves_nothing(
        self, scheduler: PluginScheduler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Let a submission fail at a late step, then submit the same app again."""

        def fail(*_args: Any, **_named: Any) -> None:
            raise RuntimeError("the contract's failure")

        owner, name = split_step(self.steps[-1])
        before = self._list(scheduler)
        with monkeypatch.context() as patched:
            patched.setattr(pkgutil.resolve_name(owner), name, fail)
            with pytest.raises(RuntimeError, match="the contract's failure"):
                self.submit(scheduler, build_shell("true", image=self.image))
        assert self._list(scheduler) == before
        assert self.list_left("contract") == []
        app_id = self.submit(scheduler, build_shell("true", image=self.image))
        self.wait_for(scheduler, app_id, AppState.SUCCEEDED)

    def test_a_command_that_is_killed_leaves_nothing_that_cannot_be_removed(self, scheduler: PluginScheduler) -> None:
        """Kill the command at each step of a submission, and check that later submissions work."""
        path = self._folder / "app.json"
        path.write_text(json.dumps(dump_app(build_shell(WAITS, name="contract-killed", image=self.image))))
        for step in self.steps:
            killed = self.begin("submit", str(path), json.dumps(dict(self.cfg)), step)
            output, errors = killed.communicate(timeout=self.limit_s)
            assert (killed.returncode, output) == (-9, ""), f"{step} was not called: {output}{errors}"
            for app_id in self._list(scheduler):
                scheduler.delete(app_id)
            self.sweep(scheduler)
            self.wait(lambda: not self.list_left("contract-killed"), f"what {step} has left goes")
            assert self._list(scheduler) == {}
        app_id = self.submit(scheduler, build_shell("true", name="contract-killed", image=self.image))
        self.wait_for(scheduler, app_id, AppState.SUCCEEDED)

    # -- agents -------------------------------------------------------------------------------------------------------

    def test_agents_form_one_job_and_their_report_is_the_status(self, scheduler: PluginScheduler) -> None:
        """Check that two nodes find each other, restart workers in place, and say why they gave up."""
        app_id = self.submit(scheduler, build_agents(FAILS_TWICE, image=self.image, restarts=1))
        described = self.wait_for(scheduler, app_id, AppState.FAILED)
        assert described.num_restarts == 1, "of workers, in place"
        assert "rank 1" in described.msg, f"the root cause is not named: {described.msg}"
        console = self.read(scheduler, app_id, 1)
        assert [text for text in ("1 of 2 attempt 0", "1 of 2 attempt 1", "attempt 2") if text in console] == [
            "1 of 2 attempt 0",
            "1 of 2 attempt 1",
        ]
        lines = [line.rpartition("]: ")[2] for line in console.splitlines()]
        for word in ("line", "warning"):
            expected = [f"{word} {number} of attempt {attempt}" for attempt in (0, 1) for number in range(50)]
            assert [line for line in lines if line.startswith(f"{word} ")] == expected, "a line was lost or cut"

    def test_rules_say_what_follows_from_a_failure(self, scheduler: PluginScheduler) -> None:
        """Check free restarts, a restart that uses the budget, a node that leaves and is replaced, and a stop.

        If a scheduler starts all nodes again when one has left, the count is lost, and the attempts begin anew.
        """
        app_id = self.submit(scheduler, build_agents(FAULTS, image=self.image, restarts=2, retries=1, rules=RULES))
        described = self.wait_for(scheduler, app_id, AppState.FAILED)
        assert "--on 'oom: stop'" in described.msg, f"the rule is not named: {described.msg}"
        assert "cause: out of main memory" in described.msg
        console = self.read(scheduler, app_id, 0)
        assert [attempt for attempt in range(7) if f"0 of 2 attempt {attempt}" in console] == [0, 1, 2, 3, 4, 5]

    def test_a_running_job_is_asked(self, scheduler: PluginScheduler) -> None:
        """Ask for checkpoint, pause, resume, stacks and stop by any node. All ranks act at one step.

        A command also runs beside the workers of one node, with their variables, or is refused in one line.
        """
        app_id = self.submit(scheduler, build_agents(COUNTS, image=self.image))
        for index in range(2):
            self.wait_line(scheduler, app_id, "counts", index)
        self._run_beside(scheduler, app_id)
        self._ask(scheduler, app_id, AskKind.CHECKPOINT)
        for index in range(2):
            self.wait_line(scheduler, app_id, "saves at", index)
        self._ask(scheduler, app_id, AskKind.PAUSE)
        self.wait(lambda: self._is_paused(scheduler, app_id), "what people are shown says that it is paused")
        self._ask(scheduler, app_id, AskKind.RESUME)
        stopped = scheduler.stop_app(app_id, 30.0)
        assert stopped.outcome is AskOutcome.DONE, stopped.line
        self.wait_for(scheduler, app_id, AppState.CANCELLED)
        consoles = [self.read(scheduler, app_id, index) for index in range(2)]
        steps = [console.rpartition("stops at ")[2].split()[0] for console in consoles]
        assert steps == [str(stopped.step)] * 2, f"{stopped.line}; consoles of the nodes: {consoles}"
        with pytest.raises(ControlError):
            scheduler.ask_app(app_id, AskKind.PAUSE, 5.0)

    @pytest.mark.long
    def test_nothing_is_left_of_a_command_that_was_given_up(self, scheduler: PluginScheduler) -> None:
        """Check that the end of `muster exec` ends what it has started, also what ignores SIGTERM."""
        app_id = self.submit(scheduler, build_agents(COUNTS, image=self.image))
        self.wait_line(scheduler, app_id, "counts", 0)
        command = ["sh", "-c", "trap '' TERM; sleep 600 & sleep 600; true", "given-up"]
        if type(scheduler).open_in_node is PluginScheduler.open_in_node:
            return  # it refuses, see `test_a_running_job_is_asked`
        with pytest.raises(ControlError, match="did not end in 5 s"):
            PluginScheduler.run_in_node(scheduler, app_id, ROLE, 0, command, 5.0)

        def find_left() -> str:
            find = ["python3", "-c", FIND, app_id, "given", "up"]
            code, left, errors = PluginScheduler.run_in_node(scheduler, app_id, ROLE, 0, find, self.limit_s)
            assert code == 0, errors
            return left

        self.wait(lambda: find_left() == "[]\n", "the end of the command")

    def test_an_elastic_job_gets_another_size(self, scheduler: PluginScheduler) -> None:
        """Ask for fewer nodes, for more nodes, and for a number out of bounds."""
        app_id = self.submit(scheduler, build_agents(COUNTS, nodes=2, least=1, image=self.image))
        for index in range(2):
            self.wait_line(scheduler, app_id, "of 2 counts", index)
        with pytest.raises((ControlError, SchedulerError)):
            scheduler.resize_app(app_id, 3, None)
        scheduler.resize_app(app_id, 1, None)
        self.wait_line(scheduler, app_id, "0 of 1 counts", 0)
        scheduler.resize_app(app_id, 2, None)
        self.wait_line(scheduler, app_id, "0 of 2 counts", 0, times=2)
        assert self.wait_for(scheduler, app_id, AppState.RUNNING).state == AppState.RUNNING

    def _count_restarts(self, scheduler: PluginScheduler, app_id: str, role: str) -> int:
        facts = scheduler.read_facts(app_id)
        assert facts is not None
        assert not is_terminal(facts.state), "while the app runs"
        own = [each for each in facts.replicas or () if each.role == role]
        reasons = [reason for each in own for reason in getattr(each, "reasons", ())]
        return sum(reason.count or 0 for reason in reasons if reason.code is Code.RESTARTS)

    def _ask(self, scheduler: PluginScheduler, app_id: str, kind: AskKind) -> None:
        """Ask the job, again while an agent that is just starting does not answer."""

        def ask() -> bool:
            answer = scheduler.ask_app(app_id, kind, 30.0)
            assert answer.outcome in (AskOutcome.DONE, AskOutcome.LOST, AskOutcome.UNREACHED), answer.line
            return answer.outcome is AskOutcome.DONE

        self.wait(ask, f"the answer to {kind.value}")

    def _run_beside(self, scheduler: PluginScheduler, app_id: str) -> None:
        """Do what `muster exec` does, on the node with rank 1."""
        script = 'echo "$RANK of $WORLD_SIZE$MUSTER_TOKEN"; cat; echo err >&2; exit 3'
        if type(scheduler).open_in_node is PluginScheduler.open_in_node:
            with pytest.raises(ControlError, match="no command can be run in the nodes of") as error:
                scheduler.open_in_node(app_id, ROLE, 1, [])
            assert error.value.exit_code is CommandExit.REFUSED
            return
        done = PluginScheduler.run_in_node(scheduler, app_id, ROLE, 1, ["sh", "-c", script], self.limit_s)
        assert done == (3, "1 of 2\n", "err\n"), done
        with pytest.raises(ControlError):
            PluginScheduler.run_in_node(scheduler, app_id, ROLE, 7, ["true"], self.limit_s)

    def _is_paused(self, scheduler: PluginScheduler, app_id: str) -> bool:
        facts = scheduler.read_facts(app_id)
        jobs = [] if facts is None else list(facts.jobs.values())
        return any(job.status is not None and job.status.state.value == "paused" for job in jobs)

    def _list(self, scheduler: PluginScheduler) -> dict[str, str]:
        return {
            each.app_id: each.state.name
            for each in scheduler.list(self.cfg)
            if each.app_id.rpartition(":")[2].startswith("contract")
        }
