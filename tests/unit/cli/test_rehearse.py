"""`muster rehearse`: what is chosen, how a run is judged, what is written, and what is undone."""

import contextlib
import errno
import inspect
import json
import os
import re
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree as ET

import pytest
import yaml
from torchx.specs import AppDef, AppState

from muster._shared.control import CommandExit, ControlError
from muster._shared.folders import remove_folder
from muster._shared.layouts import StatusPageLayout
from muster.cli import commands
from muster.cli.history.clocks import place
from muster.cli.history.sources import Event, JobRecords
from muster.cli.history.story import Story, tell
from muster.cli.rehearse import command, journal, live, plan, watch
from muster.cli.rehearse.faults import FAULTS, Moment, NodeSetting, NotPossibleError, Scene
from muster.cli.rehearse.journal import Journal, Undo
from muster.cli.rehearse.outcome import Row, Verdict, judge
from muster.cli.rehearse.page import build_page
from muster.cli.rehearse.saves import Kept, Saves, is_close
from muster.cli.rehearse.table import ADVICE, Report, build_json, build_junit, build_table
from muster.cli.rehearse.trial import Case, Limits, Result, Trial
from muster.cli.rehearse.watch import Slot
from muster.schedulers.adapter import scheduler
from muster.schedulers.adapter.scheduler import PluginScheduler

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def own_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' process keeps its handlers of signals: tests that follow in it look at them."""
    monkeypatch.setattr(scheduler, "unwind_on_signals", lambda: None)


def build_story(ranks: int = 4, rounds: int = 1) -> Story:
    def build(at_s: float, what: str, **detail: object) -> Event:
        return Event(
            agent="a", time_s=at_s, monotonic_s=at_s, node=0, node_index=0, round=1, attempt=0, what=what, detail=detail
        )

    events = [
        build(10.0, "agent_started", pid=1, start="cold"),
        build(10.1, "round_formed", world_size=ranks, nodes=2, master="", restarts_left=3),
        build(10.2, "workers_started"),
        build(11.0, "checkpoint_completed", step=19, path="19.pt"),
        build(12.0, "steps_done", done=100, is_counted=True, ago_s=0.0),
        build(12.1, "job_ended", succeeded=True),
    ]
    formed = events[1]
    events[1:1] = [replace(formed, round=number, time_s=10.0, monotonic_s=10.0) for number in range(1 - rounds, 0)]
    return tell(JobRecords(name="run", events=tuple(events)), place(events))


@pytest.mark.parametrize(("word", "is_named"), [("--max_retries=3", True), ("-m", False)])
def test_whether_the_command_names_a_parameter(word: str, is_named: bool) -> None:
    request = SimpleNamespace(component=("dist.ddp", word, "3", "--", "--max_retries"))
    assert command._names(cast("command.Request", request), "max_retries") == is_named


UNDISTURBED = Result(
    case=Case(name="undisturbed"),
    state="SUCCEEDED",
    starts=[0],
    done=100,
    saved_at=[20, 40, 60, 80],
    values={"loss": 1.0},
    story=build_story(),
)


def build_result(name: str = "rank-killed", **changes: object) -> Result:
    case = Case(name=name, fault=FAULTS[name], moment=changes.pop("moment", Moment.BETWEEN), step=50, nodes=2)  # type: ignore[arg-type]
    base = Result(case=case, state="SUCCEEDED", fault_done=50, starts=[0, 40], done=100, repeated=10, recovery_s=1.5)
    return replace(base, **{"saved_at": [20, 40, 60, 80], "values": {"loss": 1.0}, "story": build_story(), **changes})  # type: ignore[arg-type]


# -- what is chosen ----------------------------------------------------------------------------------------------------


def test_the_seed_decides_every_step_and_rank() -> None:
    faults = plan.parse_faults(None, quick=False)
    one, two, other = (plan.choose_cases(faults, UNDISTURBED, nodes=2, nproc=2, seed=seed) for seed in (7, 7, 8))
    assert one == two
    assert one != other
    assert len({case.name for case in one}) == len(one) > len(FAULTS)


@pytest.mark.parametrize("seed", range(20))
def test_a_fault_happens_at_its_moment(seed: int) -> None:
    faults = [(FAULTS["rank-killed"], moment) for moment in Moment]
    first, between, checkpoint, end = plan.choose_cases(faults, UNDISTURBED, nodes=2, nproc=2, seed=seed)
    assert first.step == 0
    assert 30 <= between.step <= 70
    assert checkpoint.step + 1 in UNDISTURBED.saved_at
    assert 98 <= end.step <= 99
    assert all(case.rank < 4 and case.node == 1 for case in (first, between, checkpoint, end))


def test_a_fault_between_comes_after_the_first_checkpoint() -> None:
    late = replace(UNDISTURBED, saved_at=[90, 100])
    cases = [
        plan.choose_cases([(FAULTS["rank-killed"], Moment.BETWEEN)], late, nodes=1, nproc=2, seed=s) for s in range(9)
    ]
    assert {case.step for (case,) in cases} <= set(range(91, 99))


def test_a_fault_waits_until_the_agents_know_of_a_checkpoint_if_the_ranks_report_some() -> None:
    """Before, a script that asks for one gets none: whether it resumes was not seen."""
    faults = [(FAULTS["rank-killed"], moment) for moment in Moment]
    cases = plan.choose_cases(faults, UNDISTURBED, nodes=2, nproc=2, seed=1)
    assert [case.latest for case in cases] == [0, (cases[1].step + 100) // 2, (cases[2].step + 100) // 2, 0]
    cases = plan.choose_cases(faults, replace(UNDISTURBED, story=None), nodes=2, nproc=2, seed=1)
    assert {case.latest for case in cases} == {0}


def test_one_fault_can_be_left_out_without_changing_the_others() -> None:
    all_of_them = plan.choose_cases(plan.parse_faults(None, quick=False), UNDISTURBED, nodes=2, nproc=2, seed=3)
    (alone,) = plan.choose_cases(plan.parse_faults("preempted", quick=False), UNDISTURBED, nodes=2, nproc=2, seed=3)
    assert alone in all_of_them


def test_what_cannot_be_tried_has_a_reason() -> None:
    words = "node-lost,rank-killed@checkpoint,rank-killed"
    never = replace(UNDISTURBED, saved_at=[])
    cases = plan.choose_cases(plan.parse_faults(words, quick=False), never, nodes=1, nproc=2, seed=1)
    obstacles = plan.find_obstacles(cases, never)
    assert "the job has 1" in obstacles["node-lost"]
    assert "no file" in obstacles["rank-killed@checkpoint"]
    assert set(obstacles) == {"node-lost", "rank-killed@checkpoint"}


@pytest.mark.parametrize(
    ("text", "line"),
    [("gone", "no fault 'gone'"), ("rank-killed@noon", "'noon' is not a moment"), (" ,", "names no fault")],
)
def test_a_wrong_fault_is_one_line(text: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ControlError, match=line):
        plan.parse_faults(text, quick=False)
    assert commands.main(["rehearse", "--faults", text, "dist.ddp", "--script", "x.py"]) == 2
    assert line in capsys.readouterr().err


def test_every_fault_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["rehearse", "--faults", "list"]) == 0
    listed = capsys.readouterr().out
    page = (ROOT / "docs/rehearse.md").read_text()
    for name, fault in FAULTS.items():
        assert name in listed
        assert f"| `{name}` | {fault.title} |" in page, name
    for_root = [each.name for each in FAULTS.values() if each.setting is not NodeSetting.ORDINARY]
    for begin, end, names in (
        ("silence. ", " need root", for_root),
        ("`--quick` tries ", " between", [each.name for each in FAULTS.values() if each.is_quick]),
        ("It can cause ", ".\n", [each.name for each in FAULTS.values() if each.live_signal]),
    ):
        assert re.findall("`(.+?)`", page.partition(begin)[2].partition(end)[0]) == names, begin


# -- how a run is judged -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "verdict", "advice", "comparison"),
    [
        (build_result(), Verdict.SURVIVED, (), "equal"),
        (build_result(starts=[0, 0], repeated=50), Verdict.STARTED_OVER, ("resume",), "equal"),
        (build_result(values={"loss": 2.0}), Verdict.DIFFERS, ("data",), "loss 2 instead of 1"),
        (build_result(state="late"), Verdict.LOST, ("hang",), ""),
        (
            build_result(state="FAILED", moment=Moment.CHECKPOINT, starts=[0], story=build_story(rounds=2)),
            Verdict.LOST,
            ("atomic",),
            "",
        ),
        (build_result(starts=[0, 0], saving_ranks=frozenset([0])), Verdict.STARTED_OVER, ("saved",), "equal"),
        (build_result(state="FAILED"), Verdict.LOST, ("failed",), ""),
        (build_result("preempted", asking_ranks=frozenset([0])), Verdict.SURVIVED, ("stop",), "equal"),
        (build_result(obstacle="no cgroup"), Verdict.NOT_TRIED, (), ""),
        (
            build_result(story=build_story(ranks=2)),
            Verdict.SURVIVED,
            (),
            "not comparable: it ended with 2 ranks, not 4",
        ),
        (build_result(story=build_story(ranks=1)), Verdict.SURVIVED, (), "not comparable: it ended with 1 rank, not 4"),
    ],
)
def test_verdicts(result: Result, verdict: Verdict, advice: tuple[str, ...], comparison: str) -> None:
    row = judge(result, UNDISTURBED, is_repeatable=True, first_save=20)
    assert (row.verdict, row.advice, row.result) == (verdict, advice, comparison)


@pytest.mark.parametrize(
    ("changes", "first_save", "is_blamed"),
    [
        ({"starts": [0, 0]}, 20, True),
        ({"starts": [0, 0]}, None, True),  # it never saves
        ({"starts": [0, 0], "saved_at": [60]}, 20, False),  # not before the fault
        ({"starts": [0, 0], "moment": Moment.FIRST}, 20, False),
        ({"starts": [30, 5]}, 20, True),  # a busy machine: what was done before was seen late
        ({"starts": [30, 20]}, 25, False),  # so was the first save
        ({"starts": [0, 19], "fault_done": 20}, None, False),  # it continues from memory
        ({"starts": [0, 0], "saving_ranks": frozenset(range(4)), "agents_knew": True}, 20, True),
        ({"starts": [0, 0], "saving_ranks": frozenset(range(4)), "agents_knew": False}, 20, False),
    ],
)
def test_only_a_script_that_could_have_resumed_has_started_over(
    changes: dict[str, object], first_save: int | None, is_blamed: bool
) -> None:
    row = judge(build_result(**changes), UNDISTURBED, is_repeatable=None, first_save=first_save)
    assert (row.verdict is Verdict.STARTED_OVER) is is_blamed


def test_a_script_that_reports_no_numbers_is_told_how_it_could() -> None:
    nothing = replace(UNDISTURBED, values={}, digests={})
    row = judge(build_result(values={}), nothing, is_repeatable=True)
    assert (row.verdict, "(worker.step(i, loss=x))" in row.result) == (Verdict.SURVIVED, True)


def test_a_script_that_never_computes_the_same_twice_is_not_comparable() -> None:
    row = judge(build_result(values={"loss": 2.0}), UNDISTURBED, is_repeatable=False)
    assert (row.verdict, "two undisturbed runs" in row.result) == (Verdict.SURVIVED, True)


def test_steps_of_the_optimizer_count_from_each_start_and_say_nothing_of_the_end() -> None:
    """A run that resumed at step 60 and finished was "not comparable: the run was ended at step 40"."""
    undisturbed = replace(UNDISTURBED, digests={"last.pt": "1"}, is_counted=False)
    resumed = build_result(done=40, is_counted=False, digests={"last.pt": "1"})
    assert judge(resumed, undisturbed, is_repeatable=None).result == "equal"
    ended = judge(build_result(done=40), UNDISTURBED, is_repeatable=None)
    assert "ended at step 40" in ended.result


@pytest.mark.parametrize(
    ("values_at", "verdict", "comparison"),
    [
        ({52: {"loss": 0.5}, 53: {"loss": 9.0}}, Verdict.SURVIVED, "equal at step 52"),
        ({51: {"loss": 0.7}, 52: {"loss": 0.7}}, Verdict.DIFFERS, "loss 0.7 instead of 0.5 at step 52"),
        ({53: {"loss": 0.5}}, Verdict.SURVIVED, "not comparable: the run was ended at step 53"),
        ({52: {"lr": 0.5}}, Verdict.SURVIVED, "not comparable: the run was ended at step 53"),
    ],
)
def test_runs_that_steps_end_are_compared_at_one_step(
    values_at: dict[int, dict[str, float]], verdict: Verdict, comparison: str
) -> None:
    undisturbed = replace(UNDISTURBED, state="reached", done=52, values_at={51: {"loss": 0.6}, 52: {"loss": 0.5}})
    row = judge(build_result(state="reached", done=53, values_at=values_at), undisturbed, is_repeatable=None)
    assert (row.verdict, row.result) == (verdict, comparison)


def test_numbers_belong_to_a_step_that_two_looks_have_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = build_run(tmp_path, monkeypatch, Limits())
    looks = iter([(1, {"a": 1.0}), (1, {"a": 1.0}), (1, {"a": 2.0}), (2, {"a": 2.0}), (2, {"a": 2.0}), (0, {})])
    run._watch = cast("Any", SimpleNamespace(look=dict, read_values=lambda: next(looks)))
    run._saves = cast("Any", SimpleNamespace(look=lambda: False))
    for _ in range(6):
        run._look()
    assert run._result.values_at == {1: {"a": 1.0}, 2: {"a": 2.0}}


def test_files_are_compared() -> None:
    undisturbed = replace(UNDISTURBED, digests={"ckpt/last.pt": "1"})
    row = judge(build_result(digests={"ckpt/last.pt": "2"}), undisturbed, is_repeatable=True)
    assert (row.verdict, row.result) == (Verdict.DIFFERS, "ckpt/last.pt differs")
    assert judge(build_result(digests={"ckpt/last.pt": "1"}), undisturbed, is_repeatable=True).result == "equal"


# -- what is written ---------------------------------------------------------------------------------------------------


def build_report() -> Report:
    results = [
        build_result(),
        build_result("loader-killed", obstacle="no <child>"),
        build_result("preempted", starts=[0, 0]),
    ]
    rows = tuple(judge(result, UNDISTURBED, is_repeatable=None, first_save=20) for result in results)
    return Report(command="dist.ddp --script train.py", seed=7, steps=100, took_s=12.0, rows=rows, notes=("added",))


def test_the_table() -> None:
    lines = build_table(build_report()).splitlines()
    assert "100 steps in 12.0 s undisturbed; seed 7" in lines[0]
    assert lines[3].split() == ["fault", "at", "verdict", "recovery", "repeated", "result"]
    assert "survived" in lines[4]
    assert "1.5 s" in lines[4]
    assert any(each.startswith("loader-killed: not tried: ") for each in lines)
    assert lines[-1].endswith("(docs/preemption.md#how-to-resume)")


def test_the_results_as_json_and_junit() -> None:
    data = json.loads(json.dumps(build_json(build_report())))
    assert (data["survived"], data["seed"], [row["verdict"] for row in data["rows"]]) == (
        False,
        7,
        ["survived", "not tried", "started over"],
    )
    suite = ET.fromstring(build_junit(build_report()).partition("\n")[2])  # written here
    assert {name: suite.get(name) for name in ("tests", "failures", "skipped")} == {
        "tests": "3",
        "failures": "1",
        "skipped": "1",
    }


def test_whatever_is_in_a_reason_the_junit_is_xml() -> None:
    row = Row(name="rank-killed", title="a rank", at="step 1", verdict=Verdict.LOST, reason="\udcff \uffff \x00 ]]> <&")
    report = Report(command="dist.ddp", seed=1, steps=9, took_s=1.0, rows=(row,))
    failure = ET.fromstring(build_junit(report).encode()).find("testcase/failure")
    assert failure.get("message") == "not survived: a rank; step 1; \\udcff ? \\x00 ]]> <&"


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    page = build_page(build_report(), [("<undisturbed>", build_story(), None), ("killed", build_story(), 11.0)])
    assert "default-src 'none'" in page
    assert "<script" not in page
    assert "style=" not in page
    assert "no &lt;child&gt;" in page
    assert page.count("<svg") == 2
    assert page.count('<line class="fault"') == 1


@pytest.mark.parametrize("name", ADVICE)
def test_the_documentation_that_an_advice_names_exists(name: str) -> None:
    file, _, anchor = ADVICE[name].page.partition("#")
    headings = [line.lstrip("# ") for line in (ROOT / file).read_text().splitlines() if line.startswith("#")]
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}


def test_nothing_that_was_not_tried_counts_as_survived() -> None:
    row = Row(name="a", title="a", at="", verdict=Verdict.NOT_TRIED, reason="no root")
    report = Report(command="", seed=0, steps=1, took_s=1.0, rows=(row,), planned=1)
    assert build_json(report)["rows"][0]["verdict"] == "not tried"
    assert "survived" not in build_table(report)
    early = replace(report, planned=22)
    assert (report.is_good, early.is_good, early.describe()[-21:]) == (True, False, "; 1 of 22 faults done")


def test_each_verdict_is_written_when_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A person ends it in the third run."""
    runs = iter([UNDISTURBED, build_result(), KeyboardInterrupt()])

    def run_once(stage: command._Stage, *_: object, **__: object) -> Result:
        stage._took_s.append(90.0)
        result = next(runs)
        if isinstance(result, Result):
            return result
        known = json.loads((tmp_path / "rehearsal" / "rehearsal.json").read_text())
        assert [row["verdict"] for row in known["rows"]] == ["not tried", "survived"]
        raise result

    monkeypatch.setattr(command._Stage, "_run_once", run_once)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    words = ["--seed", "1", "--faults", "node-lost,rank-killed,preempted", "dist.ddp", "-j", "1x4", "--script", "x.py"]
    assert commands.main(["rehearse", *words]) == 130
    shown = capsys.readouterr()
    assert "2 of 3 faults" in shown.out
    assert "fault 2 of 3: a " in shown.err


# -- what is undone ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders can be undone."""
    undo = {**journal.UNDO, "folder": lambda path: remove_folder(path, ignores_errors=True)}
    monkeypatch.setattr(journal, "UNDO", undo)


@pytest.mark.usefixtures("folders")
def test_the_journal_is_on_disk_before_and_gone_afterwards(tmp_path: Path) -> None:
    left = tmp_path / "left"
    with Journal(tmp_path / "journals") as kept:
        with kept.keep(Undo("folder", (str(left),))):
            left.mkdir()
            (path,) = (tmp_path / "journals").glob("*.json")
            assert json.loads(path.read_text())["undo"] == [{"kind": "folder", "argv": [str(left)]}]
            assert journal.undo_dead(tmp_path / "journals") == [], "its process runs"
        assert not left.exists()
    assert list((tmp_path / "journals").iterdir()) == []


@pytest.mark.usefixtures("folders")
def test_what_a_killed_rehearsal_left_is_undone_by_the_next(tmp_path: Path) -> None:
    folder, left = tmp_path / "journals", tmp_path / "left"
    folder.mkdir()
    left.mkdir()
    content = {"owner": {"pid": os.getpid(), "start_ticks": "1"}, "undo": [{"kind": "folder", "argv": [str(left)]}]}
    (folder / "1.json").write_text(json.dumps(content))
    assert journal.undo_dead(folder) == [f"an earlier rehearsal was killed; undone: folder {left}"]
    assert not left.exists()
    assert list(folder.iterdir()) == []


def test_a_journal_that_cannot_be_read_stays_and_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text("{")
    assert journal.undo_dead(tmp_path) == []
    assert (tmp_path / "1.json").exists()


# -- what is seen ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_seen_when_it_is_written_and_a_log_is_none(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    try:
        (tmp_path / "train.log").write_text("step 1\n")
        (tmp_path / "new" / "deep").mkdir(parents=True)
        assert not saves.look()
        (tmp_path / "new" / "last.pt").write_bytes(b"1")
        assert saves.look()
        assert not saves.look()
    finally:
        saves.close()


def test_a_workspace_of_any_depth_is_watched_and_removed(tmp_path: Path) -> None:
    bottom = tmp_path / "work" / "/".join("d" * 200)
    bottom.mkdir(parents=True)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 100)
    saves = Saves(tmp_path / "work")
    try:
        (bottom / "last.pt").write_bytes(b"1")
        assert saves.look()
        remove_folder(tmp_path / "work")
    finally:
        sys.setrecursionlimit(before)
        saves.close()
    assert not (tmp_path / "work").exists()


# -- in CI of users ----------------------------------------------------------------------------------------------------


def test_the_command_of_the_example_workflow_is_one() -> None:
    jobs = yaml.safe_load((ROOT / "examples/rehearse/workflow.yml").read_text())["jobs"]
    (line,) = (step["run"] for step in jobs["rehearse"]["steps"] if step.get("name") == "Rehearse")
    program, *words = shlex.split(line)
    args = commands.build_parser().parse_args(words)
    assert (program, args.command, args.quick, args.junit) == ("muster", "rehearse", True, "rehearsal.xml")
    script = args.component[args.component.index("--script") + 1]
    assert (ROOT / script).is_file()


@pytest.mark.torch
def test_a_torch_file_is_equal_if_its_tensors_are(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    kept = Kept(tmp_path / "kept")
    weight = torch.tensor([1.0, -3.0, 1e-3, float("nan"), float("inf")])

    def read(**state: object) -> dict[str, str]:
        torch.save({"w": weight, "v": weight[:3], "step": 3, "lr": 0.1, **state}, tmp_path / "last.pt")
        return kept.read(tmp_path, ["*.pt"])

    first = read()
    assert not (tmp_path / "last.pt").exists()
    unshared = read(v=weight[:3].clone())
    assert unshared == first == read() == read(lr=0.1 + 1e-9)
    rounded = weight.clone()
    rounded[2] += 2e-7  # DDP with four ranks, after a restart
    assert read(w=rounded) == first
    rounded[2] += 1e-4
    assert read(w=rounded) != first
    for wrong in (weight[:4], weight.double(), weight.nan_to_num(), -weight):
        assert read(w=wrong) != first
    assert read(step=4) != first
    assert read(lr=0.2) != first
    assert read(more=1) != first


def test_a_file_of_safetensors_is_equal_if_its_tensors_are(tmp_path: Path) -> None:
    torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    names = [tmp_path / f"{each}.safetensors" for each in ("one", "other", "wrong")]
    for path, more in zip(names, (0.0, 2e-7, 1e-3), strict=True):
        safetensors.save_file({"w": torch.ones(4, dtype=torch.float64) + more}, path)
    assert is_close(names[0], names[1])
    assert not is_close(names[0], names[2])


# -- a run -------------------------------------------------------------------------------------------------------------


def build_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: Limits) -> tuple[Trial, list[float]]:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    run = Trial(
        Case(name="x", fault=FAULTS["rank-killed"], moment=Moment.END),
        AppDef("x"),
        scheduler=cast("Any", None),
        world=cast("Any", SimpleNamespace(folder=tmp_path, cut=None)),
        journal=cast("Any", None),
        limits=limits,
    )
    return run, clock


def run_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: list[list[int]]) -> Result:
    """One rank does these steps in each round, one a second, and 10 s pass between rounds.

    The fault comes after the first round.
    """
    run, clock = build_run(tmp_path, monkeypatch, Limits())
    pages: dict[int, Slot] = {}
    run._watch = cast("Any", SimpleNamespace(look=lambda: pages, read_values=lambda: (0, {}), has_ended=lambda _: True))
    run._saves = cast("Any", SimpleNamespace(look=lambda: False))
    for steps in rounds:
        pages.clear()
        run._look()
        clock[0] += 9
        for step in steps:
            clock[0] += 1
            pages[0] = Slot(done=step, start=steps[0] - 1, is_counted=True)
            run._look()
        run._result.fault_done = run._result.done
    run._end_recovery()
    return run._result


def test_a_recovery_ends_with_a_step_beyond_those_of_before_or_with_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    further = run_steps(tmp_path, monkeypatch, [[1, 2, 3, 4], [3, 4, 5, 6]])
    assert (further.recovery_s, further.repeated, further.done) == (12, 2, 6)
    again = run_steps(tmp_path, monkeypatch, [[1, 2, 3, 4], [3, 4]])
    assert (again.recovery_s, again.repeated, again.done) == (11, 2, 4)
    assert run_steps(tmp_path, monkeypatch, [[1, 2, 3, 4], [3]]).recovery_s is None


def test_a_start_that_is_seen_late_began_where_the_rank_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = build_run(tmp_path, monkeypatch, Limits())
    pages: dict[int, Slot] = {}
    run._watch = cast("Any", SimpleNamespace(look=lambda: pages, read_values=lambda: (0, {}), has_ended=lambda _: True))
    run._saves = cast("Any", SimpleNamespace(look=lambda: False))
    pages[0] = Slot(done=20, is_counted=True)
    run._look()
    pages.clear()
    run._look()
    pages[0] = Slot(done=7, is_counted=True)
    run._look()
    assert (run._result.starts, run._result.repeated) == ([0, 0], 20)


@pytest.mark.parametrize(("step", "done"), [(0, 1), (119, 120), (120, 120)])
def test_a_trainer_that_counts_from_1_does_no_step_too_many(step: int, done: int) -> None:
    words = [0] * 8 * StatusPageLayout.WORDS
    words[StatusPageLayout.WORDS + StatusPageLayout.STEP] = step + 1
    words[StatusPageLayout.WORDS + StatusPageLayout.TOTAL] = 120
    page = b"".join(word.to_bytes(8, "little") for word in words)
    assert watch._read_slot(cast("Any", page), 0).done == done


def test_a_run_is_late_when_no_step_is_done_for_so_long_not_when_it_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, clock = build_run(tmp_path, monkeypatch, Limits(run_s=60))
    clock[0] = 100.0
    run._record_step(1)
    clock[0] = 159.0
    assert not run._is_far_enough(159.0)
    clock[0] = 160.0
    assert run._is_far_enough(160.0)
    assert (run._result.state, "for 60 s, since step 1" in run._result.reason) == ("late", True)


def test_no_rank_is_stopped_in_a_collective_before_its_first_step() -> None:
    scene = SimpleNamespace(rank=1, find_worker=lambda _: os.getpid(), count_steps=lambda _: 0)
    with pytest.raises(NotPossibleError, match="done no step"):
        next(FAULTS["rank-stopped-in-collective"].cause(cast("Scene", scene)))


# -- a job that runs ---------------------------------------------------------------------------------------------------


def test_the_processes_of_a_node_are_those_of_its_newest_agent_and_round() -> None:
    def build(what: str, agent: str = "a", node: int = 1, **detail: object) -> Event:
        return Event(
            agent=agent,
            time_s=0,
            monotonic_s=0,
            node=node,
            node_index=node,
            round=1,
            attempt=0,
            what=what,
            detail=detail,
        )

    events = [
        build("agent_started", pid=10),
        build("round_formed", rank_offset=2),
        build("worker_released", local_rank=0, pid=11),
        build("worker_released", "b", node=0, local_rank=0, pid=99),
        build("round_formed", rank_offset=4),
        build("worker_released", local_rank=1, pid=12),
    ]
    assert watch.find_processes(events, 1) == (10, {5: 12})
    assert watch.find_processes([*events, build("agent_started", "c", pid=20)], 1) == (20, {})
    assert watch.find_processes(events, 2) == (0, {})


@pytest.mark.parametrize(
    ("state", "code"), [(AppState.PENDING, CommandExit.REFUSED), (AppState.CANCELLED, CommandExit.ENDED)]
)
def test_only_a_job_that_is_over_has_ended(state: AppState, code: CommandExit) -> None:
    scheduler = SimpleNamespace(describe_app=lambda _: SimpleNamespace(state=state, roles=[]))
    with pytest.raises(ControlError, match=f"x is {state.name}: ") as raised:
        live._find_role(cast("PluginScheduler", scheduler), "x")
    assert raised.value.exit_code is code


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--app", "x", "--faults", "disk-full"], "'disk-full' cannot be caused in a job that runs"),
        (["--app", "x", "dist.ddp"], "name no component beside it"),
        (["--app", "x", "--quick"], "--quick is for a job of its own"),
        (["--app", "x", "--steps", "9"], "--steps is for a job of its own"),
        (["--app", "x", "--compare", "*.pt"], "--compare is for a job of its own"),
        (["--app", "x", "--link", "data"], "--link is for a job of its own"),
        (["--app", "x", "-o", "there"], "--output is for a job of its own"),
        (["--app", "x", "--junit", "/nowhere/x.xml"], "--junit /nowhere/x.xml: cannot be written"),
    ],
)
def test_what_app_does_not_do_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["rehearse", *words]) == 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--quick", "--faults", "preempted"], "--quick and --faults both choose the faults"),
        (["--yes"], "--yes is for a job that runs"),
        (["--junit", "/nowhere/x.xml"], "--junit /nowhere/x.xml: cannot be written"),
        (["--junit", "/"], "--junit /: cannot be written"),
    ],
)
def test_an_option_that_would_have_no_effect_is_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["rehearse", *words, "dist.ddp", "--script", "x.py"]) == 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--help", "--no-such-flag"])
def test_what_runs_nothing_leaves_the_results_of_the_last_rehearsal(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rehearsal").mkdir()
    for name in ("rehearsal.json", "index.html"):
        Path("rehearsal", name).write_text("the last one's")
    with contextlib.suppress(SystemExit):
        commands.main(["rehearse", "dist.ddp", flag])
    assert Path("rehearsal/rehearsal.json").read_text() == Path("rehearsal/index.html").read_text() == "the last one's"
    capsys.readouterr()


@pytest.mark.parametrize("error", [errno.EBUSY, errno.EACCES])
def test_a_cgroup_with_a_dying_process_is_removed_once_that_is_gone(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "group").mkdir()
    (tmp_path / "group" / "cgroup.procs").write_text("7\n8\n")
    calls: list[Path] = []

    def remove(folder: Path) -> None:
        calls.append(folder)
        if len(calls) < 3:
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(Path, "rmdir", remove)
    with contextlib.nullcontext() if error == errno.EBUSY else pytest.raises(PermissionError):
        journal.UNDO["cgroup"](str(tmp_path / "group"))
    assert len(calls) == (3 if error == errno.EBUSY else 1)
    assert (tmp_path / "cgroup.procs").read_text() == "8"
