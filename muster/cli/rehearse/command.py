"""`muster rehearse`: runs the user's own job on this machine, undisturbed first, then once for each fault."""

import inspect
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from torchx.runner import config
from torchx.specs import AppDef, Role

from muster._shared.control import CommandExit, ControlError
from muster._shared.folders import remove_folder
from muster._shared.processes import LINUX
from muster._shared.reports import format_duration
from muster.cli import run_command
from muster.cli.adapters import create_scheduler
from muster.cli.answers import confirm, say
from muster.cli.rehearse.faults import FAULTS, NodeSetting, NotPossibleError
from muster.cli.rehearse.journal import Journal, undo_dead
from muster.cli.rehearse.outcome import Row, Verdict, compare, judge
from muster.cli.rehearse.plan import choose_cases, find_obstacles, parse_faults
from muster.cli.rehearse.saves import Kept
from muster.cli.rehearse.table import Report, build_json, build_junit, build_table
from muster.cli.rehearse.trial import Case, Limits, Result, Trial, enter_folder
from muster.cli.rehearse.world import make_world
from muster.schedulers.adapter.properties import DEFAULT
from muster.schedulers.adapter.supervised import SupervisedScheduler
from muster.schedulers.agent_command import is_agent_role
from muster.schedulers.errors import EngineError, SchedulerError, describe_os_error
from muster.schedulers.runner import config_file
from muster.schedulers.supervision.registry import find_state_dir
from muster.schedulers.workspace.packing import BundleError, copy_workspace, walk_workspace

_FOLDER: Final = "{folder}"
"""In an argument: the folder of the run."""
_LEAST_RETRIES: Final = 3
_OUTPUT: Final = "rehearsal"
_RESULTS: Final = "rehearsal.json"
_KEPT: Final = "runs/compared"
_MOST_BYTES: Final = 1 << 30
_SPARE_S: Final = 60.0
"""How much longer than twice the undisturbed run a run with a fault may take."""
_LEAST_HANG_S: Final = 5.0
_LIVE_S: Final = 300.0
"""How long a job that runs may take to recover."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be rehearsed: the options of the command. None: one is not given."""

    faults: str | None
    app: str | None
    """The running job that is disturbed, instead of one that is started."""
    yes: bool
    quick: bool
    seed: int
    steps: int | None
    time_limit_s: float | None
    compare: Sequence[str]
    links: Sequence[str]
    output: str | None
    junit: str | None
    as_json: bool
    component: Sequence[str]
    """Its name, and its arguments."""

    @property
    def folder(self) -> Path:
        """Where the page, the results and the logs go."""
        return Path(self.output or _OUTPUT).absolute()


def rehearse(**options: Any) -> int:
    """Rehearse a job. Return the exit code: 0 if everything that was tried was survived.

    Args:
        options: the fields of `Request`.

    Raises:
        ArgumentError: the words name no component, or repeat an argument.
        ControlError: the job cannot be run here, or does not run undisturbed.
    """
    request = Request(**options)
    if request.faults == "list":
        print("\n".join(f"{each.name:28}{each.title}" for each in FAULTS.values()))
        return CommandExit.DONE
    _check_options(request)
    if request.app is not None:
        return _disturb(request.app, request)
    if not LINUX:
        raise ControlError("muster rehearse needs Linux", CommandExit.USAGE)
    config_file.check_files()
    defaults = config.get_configs(prefix="cli", name="run")
    component, words = run_command.split_component(request.component, defaults.get("component"))
    request = replace(request, component=(component, *words), output=str(request.folder))
    parse_faults(request.faults, quick=request.quick)  # reports wrong words at once
    try:
        return _rehearse(request)
    except (EngineError, SchedulerError, BundleError) as error:
        raise ControlError(str(error), CommandExit.REFUSED) from error
    except OSError as error:
        raise ControlError(describe_os_error(error, str(request.folder)), CommandExit.REFUSED) from error


def _check_options(request: Request) -> None:
    """Refuse what would be ignored, and a result that cannot be written, before anything runs.

    Raises:
        ControlError: one line says which option.
    """
    if request.quick and request.faults is not None:
        raise ControlError("--quick and --faults both choose the faults: give one of them", CommandExit.USAGE)
    if request.app is None:
        unused = ["--yes"] if request.yes else []
        line = "is for a job that runs: name it with --app"
    else:
        own = {
            "--quick": request.quick,
            "--steps": request.steps,
            "--compare": request.compare,
            "--link": request.links,
        }
        unused = [name for name, value in {**own, "--output": request.output}.items() if value]
        line = "is for a job of its own, not for --app"
    if unused:
        raise ControlError(f"{unused[0]} {line}", CommandExit.USAGE)
    if request.junit is not None:
        folder = os.path.dirname(request.junit) or "."
        if os.path.isdir(request.junit) or not os.access(folder, os.W_OK):
            raise ControlError(f"--junit {request.junit}: cannot be written there", CommandExit.USAGE)


def _disturb(app: str, request: Request) -> int:
    """Disturb a running job, with `--app`."""
    from muster.cli.rehearse import live

    if request.component:
        raise ControlError("--app is for a job that runs: name no component beside it", CommandExit.USAGE)
    names = [each.strip() for each in (request.faults or "rank-killed").split(",")]
    wrong = [name for name in names if name not in live.CAUSED]
    if wrong:
        line = f"{wrong[0]!r} cannot be caused in a job that runs; these can: {', '.join(live.CAUSED)}"
        raise ControlError(line, CommandExit.USAGE)
    limit_s = request.time_limit_s or _LIVE_S

    def may(what: str) -> bool:
        return request.yes or confirm(f"{what}. Do it?", "do this")

    rows: list[Row] = []
    try:
        for row in live.disturb(app, names, seed=request.seed, limit_s=limit_s, confirm=may):
            rows.append(row)
            say(_describe(row))
    finally:  # also what is known when a person ends it
        report = Report(command=app, seed=request.seed, steps=None, took_s=0.0, rows=tuple(rows), planned=len(names))
        if rows and request.junit is not None:
            Path(request.junit).write_text(build_junit(report), encoding="utf-8")
        if rows:
            _print(request, report)
    has_tried = any(row.verdict is not Verdict.NOT_TRIED for row in rows)
    return CommandExit.DONE if report.is_good and has_tried else CommandExit.REFUSED


def _rehearse(request: Request) -> int:
    journals = find_state_dir(os.environ) / "rehearsals"
    for line in undo_dead(journals):
        say(line)
    workspace = Path.cwd()
    stage = None
    try:
        with ExitStack() as stack:
            journal = stack.enter_context(Journal(journals))
            scheduler = stack.enter_context(closing(create_scheduler(DEFAULT)))
            assert isinstance(scheduler, SupervisedScheduler)  # noqa: S101  # this package's
            begun = _Stage(request, workspace, scheduler, journal)  # reports wrong words, or prints the help
            _make_output(request.folder)
            stack.callback(remove_folder, request.folder / _KEPT, ignores_errors=True)
            stage = begun
            stage.rehearse()
    finally:  # also what is known when a person ends it
        report = None if stage is None else stage.build_report()
        if report is not None:
            _print(request, report)
    return CommandExit.DONE if report is not None and report.is_good else CommandExit.REFUSED


def _print(request: Request, report: Report) -> None:
    print(json.dumps(build_json(report)) + "\n" if request.as_json else build_table(report), end="")
    if request.app is None and not request.as_json:
        say(f"written: {request.folder / 'index.html'}")


class _Stage:
    """One rehearsal."""

    def __init__(self, request: Request, workspace: Path, scheduler: SupervisedScheduler, journal: Journal) -> None:
        self._request, self._workspace, self._scheduler, self._journal = request, workspace, scheduler, journal
        self._added: list[str] = []
        self._role = _find_role(self._build_app(_FOLDER, ()))
        self._added, self._notes = _choose_words(request, self._role.num_replicas)
        self._count = 0
        self._steps = request.steps
        self._kept = Kept(request.folder / _KEPT)
        self._results: list[Result] = []
        """Of all runs, the undisturbed one first."""
        self._again: Result | None = None
        self._planned = 0
        self._took_s: list[float] = []
        """How long each run took in all."""

    def rehearse(self) -> None:
        """Do all runs, and write each verdict when it is known."""
        request = self._request
        undisturbed = self._run_undisturbed()
        self._results.append(undisturbed)
        faults = parse_faults(request.faults, quick=request.quick)
        nodes = self._role.num_replicas
        nproc = max(1, undisturbed.ranks // nodes)
        cases = choose_cases(faults, undisturbed, nodes=nodes, nproc=nproc, seed=request.seed)
        self._planned = len(cases)
        obstacles = find_obstacles(cases, undisturbed)
        self._write()
        for number, case in enumerate(cases, 1):
            if case.name in obstacles:
                result = Result(case=case, obstacle=obstacles[case.name])
            else:
                left = sum(each.name not in obstacles for each in cases[number - 1 :])
                left_s = left * sum(self._took_s) / len(self._took_s)
                say(f"fault {number} of {len(cases)}: {case.title}; about {format_duration(left_s)} left")
                result = self._run(case, undisturbed)
                if result.is_missed:  # as on a busy machine
                    say(f"{case.name}: {result.obstacle}: once more")
                    result = self._run(case, undisturbed)
                if self._again is None and compare(result, undisturbed, is_repeatable=None)[0]:
                    say("the result differs: one more undisturbed run shows whether it always does")
                    self._again = self._run_once(Case(name="undisturbed-again", nodes=nodes), ())
            self._results.append(result)
            say(_describe(self._judge(result)))
            self._write()

    def build_report(self) -> Report | None:
        """Return what is known so far. None: the undisturbed run has not ended, or not well."""
        if not self._results:
            return None
        request, undisturbed = self._request, self._results[0]
        return Report(
            command=" ".join(request.component),
            seed=request.seed,
            steps=undisturbed.done,
            took_s=_find_length_s(undisturbed),
            rows=tuple(map(self._judge, self._results[1:])),
            planned=self._planned,
            notes=tuple(self._notes),
        )

    def _write(self) -> None:
        report = self.build_report()
        assert report is not None  # noqa: S101  # the undisturbed run has ended
        _write(self._request, report, self._results)

    def _judge(self, result: Result) -> Row:
        """Judge a run beside those so far."""
        undisturbed, again = self._results[0], self._again
        is_repeatable = None if again is None else not compare(again, undisturbed, is_repeatable=None)[0]
        saves = (each for run in self._results for each in run.saved_at if 0 < each < undisturbed.done)
        return judge(result, undisturbed, is_repeatable=is_repeatable, first_save=min(saves, default=None))

    def _run_undisturbed(self) -> Result:
        request = self._request
        say(f"seed {request.seed}; undisturbed: {' '.join(request.component)}")
        result = self._run_once(Case(name="undisturbed", nodes=self._role.num_replicas), (), is_end_good=True)
        if not result.has_ended_well:
            line = (
                f"the undisturbed run did not succeed: {result.reason or result.state}; its output is in {result.logs}"
            )
            raise ControlError(f"{line}. What .torchxignore names is not in the run's folder", CommandExit.REFUSED)
        if not result.starts:
            line = "the undisturbed run has reported no step: call muster.worker.step(i, total=N) at each step"
            raise ControlError(f"{line} (docs/worker-api.md)", CommandExit.REFUSED)
        if result.done - result.starts[0] < 3:
            line = f"the undisturbed run did {result.done - result.starts[0]} steps; a rehearsal needs 3 or more"
            raise ControlError(f"{line}. Is there a checkpoint of an earlier run?", CommandExit.REFUSED)
        if result.state == "reached":
            self._steps = result.done
        say(f"undisturbed: {result.done} steps in {_find_length_s(result):.1f} s")
        return result

    def _run(self, case: Case, undisturbed: Result) -> Result:
        assert case.fault is not None  # noqa: S101
        added: tuple[str, ...] = ()
        limit_s = 2 * _find_length_s(undisturbed) + _SPARE_S
        if case.fault.needs_hang_watch and not _names(self._request, "hang_timeout"):
            hang_s = max(_LEAST_HANG_S, 3 * undisturbed.longest_s)
            added = ("--hang_timeout", f"{hang_s:.0f}")
            limit_s += 2 * hang_s
            note = f"--hang_timeout {hang_s:.0f} was added to the runs with a hang: the command names none"
            self._notes += [] if note in self._notes else [note]
        return self._run_once(case, added, limit_s=limit_s)

    def _run_once(
        self, case: Case, added: Sequence[str], *, limit_s: float | None = None, is_end_good: bool = False
    ) -> Result:
        request = self._request
        self._count += 1
        began_s = time.monotonic()
        folder = request.folder / "runs" / f"{self._count:02d}-{case.name}"
        folder.mkdir(parents=True)
        run_s = limit_s if request.time_limit_s is None or not is_end_good else request.time_limit_s
        limits = Limits(steps=self._steps, run_s=run_s, is_end_good=is_end_good)
        setting = NodeSetting.ORDINARY if case.fault is None else case.fault.setting
        try:
            with make_world(setting, folder, nodes=case.nodes, journal=self._journal) as world:
                work = world.folder / "work"
                work.mkdir()
                _copy(self._workspace, work, request)
                app = self._build_app(str(work), added)
                trial = Trial(case, app, scheduler=self._scheduler, world=world, journal=self._journal, limits=limits)
                result = trial.run(self._kept, request.compare)
                with suppress(OSError):
                    remove_folder(work)
        except NotPossibleError as error:
            return Result(case=case, obstacle=str(error))
        self._took_s.append(time.monotonic() - began_s)
        result.logs = str(folder / "logs")
        return result

    def _build_app(self, folder: str, added: Sequence[str]) -> AppDef:
        words = [word.replace(_FOLDER, folder) for word in (*self._added, *added, *self._request.component[1:])]
        with enter_folder(self._workspace):
            return run_command.build_app(self._request.component[0], words)


def _choose_words(request: Request, nodes: int) -> tuple[list[str], list[str]]:
    """Return what the rehearsal adds to the command, and a line for each."""
    function = run_command.find_function(request.component[0])
    if _names(request, "max_retries") or "max_retries" not in inspect.signature(function).parameters:
        return [], []
    retries = str(max(_LEAST_RETRIES, nodes))  # all nodes are lost at once
    note = f"--max_retries {retries} was added: the command names none, and a job without retries survives no failure"
    return ["--max_retries", retries], [note]


def _names(request: Request, parameter: str) -> bool:
    """Return whether the command or `.torchxconfig` gives a parameter of the component."""
    name, *words = request.component
    given = {word.lstrip("-").partition("=")[0] for word in run_command.list_own(words) if word.startswith("-")}
    return parameter in given or parameter in (config.load_sections(prefix="component").get(name) or {})


def _find_role(app: AppDef) -> Role:
    if len(app.roles) != 1 or not is_agent_role(app.roles[0]):
        names = ", ".join(role.name for role in app.roles)
        raise ControlError(
            f"a job of one role that runs agents can be rehearsed; this one has: {names}", CommandExit.USAGE
        )
    return app.roles[0]


def _copy(workspace: Path, work: Path, request: Request) -> None:
    """Give a run a folder of its own: a checkpoint of another run must not be found in it."""
    without = [os.path.relpath(request.folder, workspace), *request.links]
    sizes = ((workspace / each).lstat().st_size for each in walk_workspace(workspace, without))
    if (size := sum(sizes)) > _MOST_BYTES:
        line = f"{workspace} has {size / 1e9:.1f} GB, and each run gets a copy"
        raise ControlError(
            f"{line}: name what runs only read with --link, and the rest in .torchxignore", CommandExit.REFUSED
        )
    copy_workspace(str(workspace), str(work), without)
    for name in request.links:
        if not (workspace / name).exists():
            raise ControlError(f"--link {name}: {workspace} has no such file or folder", CommandExit.USAGE)
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).symlink_to(workspace / name)


def _make_output(folder: Path) -> None:
    """Make the folder empty, if it is an earlier rehearsal's.

    Raises:
        ControlError: it holds something else.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / _RESULTS).is_file():
        raise ControlError(
            f"{folder} is not empty, and is not the output of a rehearsal: name another folder with --output",
            CommandExit.REFUSED,
        )
    with suppress(OSError):
        remove_folder(folder / "runs")
    (folder / "index.html").unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _RESULTS).write_text("{}\n")


def _write(request: Request, report: Report, results: Sequence[Result]) -> None:
    from muster.cli.rehearse.page import build_page

    runs = [(each.case.title, each.story, each.caused_s) for each in results if each.story is not None]
    (request.folder / "index.html").write_text(build_page(report, runs), "utf-8", errors="replace")
    (request.folder / _RESULTS).write_text(json.dumps(build_json(report), indent=1) + "\n", encoding="utf-8")
    if request.junit is not None:
        Path(request.junit).write_text(build_junit(report), encoding="utf-8")


def _find_length_s(result: Result) -> float:
    return 0.0 if result.story is None else result.story.end_s - result.story.start_s


def _describe(row: Row) -> str:
    recovery = "" if row.recovery_s is None else f"after {row.recovery_s:.1f} s"
    repeated = "" if not row.repeated else f"{row.repeated} step{'' if row.repeated == 1 else 's'} repeated"
    words = ", ".join(filter(None, (recovery, repeated, row.result, row.reason)))
    return f"{row.name}, {row.at}: {row.verdict.value}" + (f": {words}" if words else "")
