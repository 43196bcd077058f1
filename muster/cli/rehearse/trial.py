"""Runs the job once, with one fault or none, and says what happened: the steps, the fault's moment, the end."""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from torchx.specs import AppDef

from muster._shared.contract import LogNames
from muster.cli.history import sources
from muster.cli.history.clocks import place
from muster.cli.history.story import Story, tell
from muster.cli.rehearse.faults import Course, Fault, Moment, NotPossibleError
from muster.cli.rehearse.journal import Journal
from muster.cli.rehearse.saves import Kept, Saves
from muster.cli.rehearse.watch import Slot, Watch
from muster.cli.rehearse.world import World
from muster.schedulers.adapter.supervised import SupervisedScheduler
from muster.schedulers.local.submission import build_spec
from muster.schedulers.supervision import client
from muster.schedulers.supervision.app_folder import AppFolder
from muster.schedulers.wording.words import word_all

_LOOK_S: Final = 0.002
_STATE_S: Final = 0.2
"""How often the app's state is read."""
_MOST_LIMITS: Final = 10
"""A run that goes on and on is ended after this many times its limit."""
_VALUES_LIMIT: Final = 256
_END_S: Final = 60.0
"""How long the end of an app may take beyond its grace period."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run that is to be done."""

    name: str
    fault: Fault | None = None
    moment: Moment | None = None
    step: int = 0
    """The fault happens when some rank has done this many steps."""
    latest: int = 0
    """Until some rank has done this many steps, the fault waits for the agents to know of a checkpoint of all ranks.

    Before that, no script could continue from one. 0: it does not wait.
    """
    rank: int = 0
    node: int = 0
    nodes: int = 1

    @property
    def title(self) -> str:
        """For people."""
        return "undisturbed" if self.fault is None else self.fault.title


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What ends a run before the script does."""

    steps: int | None = None
    run_s: float | None = None
    """From the start of an undisturbed run, or else since the last step, because what is slow is not lost."""
    is_end_good: bool = False
    """The time limit ends an undisturbed run. That does not mean that the job hangs."""


@dataclass(kw_only=True)
class Result:
    """What became of a run."""

    case: Case
    state: str = ""
    """"SUCCEEDED" or "FAILED" of the app, "reached" (it did the steps that were wanted), or "late" (it was ended)."""
    reason: str = ""
    """Why it failed, in one line."""
    obstacle: str = ""
    """Why the fault was not caused. "": it was."""
    is_missed: bool = False
    """The run was over before the fault's moment came, or before it was seen: another run may have it."""
    fault_done: int | None = None
    """Steps that the slowest rank had done when the fault happened."""
    caused_s: float | None = None
    """When, in seconds since the epoch."""
    agents_knew: bool = False
    """When the fault happened, the agents knew of a checkpoint that all ranks had reported."""
    starts: list[int] = field(default_factory=list)
    """The first step of each round that did one."""
    done: int = 0
    """Steps at the end, of the slowest rank."""
    is_counted: bool = True
    saved_at: list[int] = field(default_factory=list)
    """Steps that were done when something was saved."""
    longest_s: float = 0.0
    """The longest time between two steps."""
    repeated: int = 0
    recovery_s: float | None = None
    """How long no new step was done because workers were started again.

    It counts until the job was further than before, or at its last step again. None: they were not started again, or
    have not gone on.
    """
    values: Mapping[str, float] = field(default_factory=dict)
    """The last numbers that global rank 0 has reported, by name."""
    values_at: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """Its numbers by the steps that it had done, the last `_VALUES_LIMIT` that were seen after the fault."""
    story: Story | None = None
    """From the records. None: there are none."""
    saving_ranks: frozenset[int] = frozenset()
    """The ranks that have reported a checkpoint."""
    asking_ranks: frozenset[int] = frozenset()
    """The ranks that ask whether they must stop."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """The digests of the files that are compared, by name."""
    logs: str = ""

    @property
    def ranks(self) -> int:
        """The number of ranks of the last round."""
        return self.story.rounds[-1][4] if self.story is not None and self.story.rounds else 0

    @property
    def has_ended_well(self) -> bool:
        """The script has ended, or did the steps that were wanted."""
        return self.state in ("SUCCEEDED", "reached")


class Trial:
    """One run of the job. It is also the `Scene` of its fault."""

    def __init__(
        self,
        case: Case,
        app: AppDef,
        *,
        scheduler: SupervisedScheduler,
        world: World,
        journal: Journal,
        limits: Limits,
    ) -> None:
        """Prepare it.

        Args:
            case: what is to be done.
            app: has one role, which runs agents.
            scheduler: `local_cwd`.
            world: its folder has `work`, in which the job runs. Its logs are put into `logs` beside it.
            journal: for what the fault has to undo.
            limits: of the run.
        """
        self.rank, self.node, self.nodes, self.journal = case.rank, case.node, case.nodes, journal
        self._case, self._app, self._scheduler, self._limits = case, app, scheduler, limits
        self._world, self._work = world, world.folder / "work"
        self.disk, self.cut = world.folder, world.cut
        self._result = Result(case=case)
        self._app_folder: AppFolder | None = None
        self._slots: dict[int, Slot] = {}
        self._is_saving = False
        self._counts = False
        """The script counts its steps."""
        self._has_begun = False
        """A step was done in the round that runs."""
        self._last_step_s: float | None = None
        self._most = 0
        """Steps that the slowest rank has done at most."""
        self._most_s = time.monotonic()
        """When it did the last of them. Before the first one, when the fault happened."""
        self._is_behind = False
        """Workers were started again since."""
        self._course: Course | None = None
        self._next_s = 0.0
        self._seen: tuple[int, dict[str, float]] = (0, {})
        """What the latest look has read of global rank 0."""

    def run(self, kept: Kept, compare: Sequence[str] = ()) -> Result:
        """Run it to its end.

        Args:
            kept: what the first run has left.
            compare: patterns of files below the working folder whose content is to be known afterwards.

        Raises:
            EngineError, SchedulerError: the app cannot be started.
        """
        result = self._result
        with contextlib.ExitStack() as stack:
            self._saves = Saves(self._work)
            stack.callback(self._saves.close)
            stack.callback(self._end_app)
            app = self._submit()
            self._watch = Watch(app.role_dir(self._app.roles[0].name))
            stack.callback(self._watch.close)
            stack.callback(self._end_fault)
            self._follow(app)
            self._end_recovery()
        result.story = self._read_story(app)
        result.digests = kept.read(self._work, compare)
        return result

    # -- the scene ---------------------------------------------------------------------------------------------------

    def find_worker(self, rank: int) -> int:
        """See `Scene`."""
        return self._watch.find_worker(rank)

    def find_agent(self, node: int) -> int:
        """See `Scene`."""
        return self._watch.find_agent(node)

    def has_all_workers(self) -> bool:
        """See `Scene`."""
        try:
            return all(self.find_worker(rank) for rank in self._slots)
        except NotPossibleError:
            return False

    def count_steps(self, rank: int) -> int:
        """See `Scene`."""
        return self._slots.get(rank, Slot()).done

    @property
    def longest_step_s(self) -> float:
        """See `Scene`."""
        return self._result.longest_s

    # -- the run -----------------------------------------------------------------------------------------------------

    def _submit(self) -> AppFolder:
        with enter_folder(self._work):
            info = self._scheduler.submit_dryrun(self._app, {"log_dir": str(self._world.folder / "logs")})
            spec = self._world.place(build_spec(info.request, self._scheduler.backend))
            self._scheduler.start_app(spec, detach=False)
        folder = AppFolder(spec.folder)
        self._scheduler.find_registry().remove(spec.app_id)  # `muster list` shows no rehearsals
        self._app_folder = folder
        return folder

    def _follow(self, app: AppFolder) -> None:
        started_s = state_s = time.monotonic()
        while True:
            self._look()
            self._disturb()
            now_s = time.monotonic()
            if self._result.obstacle or self._is_far_enough(now_s - started_s):
                return
            if now_s - state_s >= _STATE_S:
                state_s = now_s
                if client.has_ended(app.read_record()):
                    self._look()
                    return
            self._saves.wait_written(_LOOK_S)

    def _is_far_enough(self, for_s: float) -> bool:
        limits, result = self._limits, self._result
        is_over = limits.run_s is not None and for_s >= limits.run_s
        if (limits.steps is not None and result.done >= limits.steps) or (is_over and limits.is_end_good):
            result.state = "reached"
        elif limits.run_s is not None and is_over:
            still_s = time.monotonic() - max(self._most_s, self._last_step_s or 0.0)
            if still_s >= limits.run_s:
                result.state = "late"
                result.reason = f"no step was done for {still_s:.0f} s, since step {result.done}"
            elif for_s >= _MOST_LIMITS * limits.run_s:
                result.state, result.reason = "late", f"it had not ended after {for_s:.0f} s, at step {result.done}"
        return bool(result.state)

    def _look(self) -> None:
        result = self._result
        self._read_values()
        slots = self._watch.look()
        has_saved = self._saves.look()
        if slots:
            self._slots = slots
            result.saving_ranks |= {rank for rank, each in slots.items() if each.has_saved}
            result.asking_ranks |= {rank for rank, each in slots.items() if each.asks}
        # An optimizer's steps count until the script's own come.
        self._counts = self._counts or any(each.is_counted for each in slots.values())
        by_rank = {rank: each.done for rank, each in slots.items() if each.done and each.is_counted is self._counts}
        counts = list(by_rank.values())
        if not counts:
            self._has_begun = False
        else:
            result.is_counted = self._counts
            if not self._has_begun:
                self._has_begun = True
                start = min(slots[rank].start for rank in by_rank)
                if result.starts and result.is_counted:
                    result.repeated += max(0, result.done - start)
                self._is_behind = result.fault_done is not None
                result.starts.append(start)
                self._last_step_s, result.done = None, start
            # A rank that ended stepless had none left.
            if min(counts) > result.done and all(map(self._watch.has_ended, slots.keys() - by_rank.keys())):
                self._record_step(min(counts))
        if has_saved or any(each.is_saving for each in slots.values()):
            self._is_saving = True
            if result.saved_at[-1:] != [result.done]:
                result.saved_at.append(result.done)
        else:
            self._is_saving = False

    def _read_values(self) -> None:
        """Read the numbers of global rank 0.

        They belong to its step if two looks have found both: a rank writes its numbers just before its step.
        """
        result, (done, values) = self._result, self._watch.read_values()
        result.values = values or result.values
        if done and values and (done, values) == self._seen:
            result.values_at.pop(done, None)
            result.values_at[done] = values
            if len(result.values_at) > _VALUES_LIMIT:
                del result.values_at[next(iter(result.values_at))]
        self._seen = done, values

    def _record_step(self, done: int) -> None:
        now_s = time.monotonic()
        if self._last_step_s is not None:
            self._result.longest_s = max(self._result.longest_s, now_s - self._last_step_s)
        self._last_step_s, self._result.done = now_s, done
        if done > self._most:
            if self._is_behind:
                self._result.recovery_s = (self._result.recovery_s or 0.0) + now_s - self._most_s
            self._most, self._most_s, self._is_behind = done, now_s, False

    def _end_recovery(self) -> None:
        """End the recovery of a run without a step beyond those of before with its last step."""
        if self._is_behind and self._last_step_s is not None and self._result.done == self._most:
            self._result.recovery_s = (self._result.recovery_s or 0.0) + self._last_step_s - self._most_s

    def _disturb(self) -> None:
        fault, result = self._case.fault, self._result
        if fault is None or (result.fault_done is None and not self._is_due()):
            return
        if result.fault_done is None:
            result.fault_done, result.caused_s = result.done, time.time()
            result.agents_knew = self._watch.has_checkpoint
            result.values_at.clear()
            self._most_s = time.monotonic() if self._most == 0 else self._most_s
            if self._case.moment is Moment.CHECKPOINT:
                self.rank = next(self._find_saving(), self.rank)
            self._course = fault.cause(self)
        if self._course is None or time.monotonic() < self._next_s:
            return
        try:
            self._next_s = time.monotonic() + next(self._course)
        except StopIteration:
            self._course = None
        except NotPossibleError as error:
            self._course, result.obstacle = None, str(error)
        except ProcessLookupError as error:
            self._course, result.obstacle = None, f"process {error} had ended before"

    def _is_due(self) -> bool:
        most = max((each.done for each in self._slots.values()), default=0)
        if self._case.moment is Moment.FIRST:
            return self._watch.runs and bool(self._slots)
        if most < self._case.latest and not self._watch.has_checkpoint:
            return False
        if self._case.moment is Moment.CHECKPOINT:
            return most >= self._case.step and self._is_saving
        return most >= self._case.step > 0

    def _find_saving(self) -> Iterator[int]:
        """Return the ranks that say that they save, or have a file of the run's folder open."""
        yield from (rank for rank, slot in self._slots.items() if slot.is_saving)
        for rank in self._slots:
            with contextlib.suppress(OSError, NotPossibleError):
                folder = Path(f"/proc/{self.find_worker(rank)}/fd")
                if any(Path(os.readlink(link)).is_relative_to(self._work) for link in folder.iterdir()):
                    yield rank

    def _end_fault(self) -> None:
        if self._course is not None:
            self._course.close()

    # -- the end -----------------------------------------------------------------------------------------------------

    def _end_app(self) -> None:
        folder, result = self._app_folder, self._result
        if folder is None:
            return
        if not client.has_ended(folder.read_record()):
            client.request_stop(folder, "kill" if result.state == "late" else "cancel")
            client.wait_ended(folder, limit_s=folder.read_spec().grace_s + _END_S)
        record = folder.read_record()
        if not result.state and record is not None and record.app.outcome is not None:
            result.state = record.app.outcome.value
            result.reason = "" if result.state == "SUCCEEDED" else word_all(record.app.reasons)
        if result.case.fault is not None and result.fault_done is None and not result.obstacle:
            when = "a checkpoint" if self._case.moment is Moment.CHECKPOINT else "the moment"
            result.is_missed = True
            result.obstacle = f"{when} at step {self._case.step} or later had not come when the run ended"

    def _read_story(self, app: AppFolder) -> Story | None:
        files = sorted(app.role_dir(self._app.roles[0].name).glob(f"*/{LogNames.EVENTS}"))
        events = sources.parse_files((str(path), sources.read_events(path)) for path in files)
        return tell(sources.JobRecords(name=self._case.name, events=events), place(events)) if events else None


@contextlib.contextmanager
def enter_folder(folder: Path) -> Iterator[None]:
    """Be in a folder for a while, as `contextlib.chdir` of Python 3.11."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
