"""The words of the `muster` command, what it prints, and its completion."""

import errno
import json
import os
import sys
from types import SimpleNamespace

import pytest

from muster import __version__
from muster._shared.contract import AskKind, AskOutcome
from muster._shared.control import CommandExit, ControlError, get_exit_code, merge_answers
from muster._shared.fields import LateRank
from muster._shared.reports import Answer, RankProgress, Stack
from muster.cli import answers, operations, prune
from muster.cli.commands import main


def test_every_outcome_has_an_exit_code():
    codes = {outcome: get_exit_code(Answer(outcome=outcome, line="x")) for outcome in AskOutcome}
    others = {AskOutcome.DONE: 0, AskOutcome.REFUSED: 1, AskOutcome.LATE: 5}
    assert codes == {**others, AskOutcome.LOST: 6, AskOutcome.UNREACHED: 6}


@pytest.mark.parametrize("command", ["checkpoint", "pause", "resume", "stacks"])
def test_a_command_asks_what_its_name_says(command, monkeypatch, capsys):
    called = []

    def ask(*words, **options):
        called.append((words, options))
        return Answer(outcome=AskOutcome.LATE, line="rank 3 is late", step=4)

    monkeypatch.setattr(operations, "ask", ask)
    assert main([command, "local_cwd://torchx/x", "--limit", "7", "--json"]) == CommandExit.LATE
    assert called == [(("local_cwd://torchx/x", AskKind(command)), {"limit_s": 7.0})]
    printed = json.loads(capsys.readouterr().out)
    assert (printed["outcome"], printed["exit_code"], printed["step"]) == ("late", 5, 4)
    assert main([command, "local_cwd://torchx/x"]) == CommandExit.LATE
    assert called[1][1] == {"limit_s": 60.0}
    assert capsys.readouterr() == ("", "rank 3 is late\n")


def test_an_answer_as_json(monkeypatch, capsys):
    """What docs/muster-command.md promises, and what else the agents say of a rank."""
    shown = RankProgress(global_rank=0, step=7, total=9, rate=2.0, values=(("loss", "0.25"), ("lr", "nan")), moved="")
    answer = Answer(
        outcome=AskOutcome.DONE,
        line="x",
        step=7,
        ranks=1,
        took_s=0.5,
        late=(LateRank(global_rank=1, step=None, silent_s=2.5),),
        stacks=(Stack(global_rank=0, node=0, local_rank=0, text="a"),),
        progress=(shown,),
    )
    monkeypatch.setattr(operations, "ask", lambda *_, **__: answer)
    assert main(["stacks", "local_cwd://torchx/x", "--json"]) == CommandExit.DONE
    assert json.loads(capsys.readouterr().out) == {
        "outcome": "done",
        "line": "x",
        "is_unchanged": False,
        "step": 7,
        "ranks": 1,
        "took_s": 0.5,
        "format": 1,
        "exit_code": 0,
        "late": [{"global_rank": 1, "step": None, "silent_s": 2.5, "role": ""}],
        "stacks": [{"global_rank": 0, "node": 0, "local_rank": 0, "text": "a", "role": ""}],
        "progress": [
            {
                "global_rank": 0,
                "step": 7,
                "total": 9,
                "optimizer_steps": None,
                "rate": 2.0,
                "role": "",
                "values": {"loss": 0.25, "lr": "nan"},
                "has_moved": True,
                "moved": "",
                "is_busy": False,
                "still_s": None,
            }
        ],
    }


def test_what_could_not_be_passed_on_is_one_line(monkeypatch, capsys):
    def operation(handle, *, limit_s, now):
        assert (limit_s, now) == (60.0, False)
        raise ControlError("no such app", CommandExit.UNKNOWN)

    monkeypatch.setattr(operations, "stop", operation)
    assert main(["stop", "local_cwd://torchx/x"]) == CommandExit.UNKNOWN
    assert capsys.readouterr().err == "muster: no such app\n"
    assert main(["stop", "local_cwd://torchx/x", "--json"]) == CommandExit.UNKNOWN
    assert json.loads(capsys.readouterr().out) == {"outcome": "unknown", "line": "no such app", "exit_code": 3}


def test_after_ctrl_c_it_is_said_that_a_request_may_still_be_done(monkeypatch, capsys):
    def operation(handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(operations, "delete", operation)
    assert main(["delete", "local_cwd://torchx/x"]) == 130
    assert capsys.readouterr().err.startswith("muster: interrupted: ")


@pytest.mark.parametrize(
    ("words", "age_s"), [([], 0.0), (["--older-than", "1.5h"], 5400.0), (["--old", "2w"], 1209600)]
)
def test_prune_takes_ages(words, age_s, monkeypatch):
    called = []
    monkeypatch.setattr(prune, "prune", lambda **options: called.append(options) or 0)
    assert main(["prune", *words]) == 0
    assert called == [{"older_than_s": age_s, "dry_run": False, "yes": False}]


def test_a_user_without_a_home_folder_is_told_so(monkeypatch, capsys):
    """`muster run` ended in TorchX's traceback."""
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert main(["list"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_the_file_system_refuses_is_one_line(monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    scheduler = SimpleNamespace(ask_app=refuse, close=lambda: None)
    monkeypatch.setattr(operations, "create_scheduler", lambda name: scheduler)
    assert main(["stop", "local_cwd://torchx/x"]) == CommandExit.LOST
    assert "local_cwd://torchx/x: " in capsys.readouterr().err


def test_what_was_deleted_is_an_answer(monkeypatch, capsys):
    class Scheduler:
        backend = "local_cwd"
        deleted = ()

        def describe_app(self, app_id):
            return app_id

        def delete_app(self, app_id):
            self.deleted = (*self.deleted, app_id)

        def close(self):
            pass

    scheduler = Scheduler()
    monkeypatch.setattr(operations, "create_scheduler", lambda name: scheduler)
    assert main(["delete", "local_cwd://torchx/x", "--json"]) == CommandExit.DONE
    printed = json.loads(capsys.readouterr().out)
    assert printed["outcome"] == "done"
    assert scheduler.deleted == ("x",)


@pytest.mark.parametrize(
    ("interrupt", "code", "out", "err"),
    [(KeyboardInterrupt, 130, "", "\nmuster: interrupted\n"), (EOFError, 1, "\nnothing was removed\n", "")],
)
def test_a_person_who_does_not_want_to_answer(interrupt, code, out, err, monkeypatch, capsys):
    """Ctrl-C and Ctrl-D at the question of `prune`."""

    def answer(question):
        raise interrupt

    monkeypatch.setattr(prune, "find_leftovers", lambda env, ended_before_s, opened: [object()])
    monkeypatch.setattr(prune, "print_leftovers", lambda found: None)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", answer)
    assert main(["prune"]) == code
    assert capsys.readouterr() == (out, err)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["stop", "a://b/c", "--limit", "0"], "'0' is not a number of seconds from 1 to 86400"),
        (["stop", "a://b/c", "--limit", "nan"], "'nan' is not a number of seconds"),
        (["resize", "a://b/c", "0"], "'0' is not a number of nodes, 1 or more"),
        (["log", "a://b/c", "--grep", "(" * 2000], "is not a regular expression: "),
        (["statsu"], "muster: there is no command 'statsu': did you mean 'status'?"),
        (["zzz"], "muster: there is no command 'zzz': `muster --help` lists them"),
        (["list", "--bogus"], "muster list: error: unrecognized arguments: --bogus"),
        (["log", "last", "-n"], "muster log: error: unrecognized arguments: -n"),
        (["run", "-j", "2x4", "--script", "t.py"], "-j; a component such as dist.ddp must stand before its"),
        (["run", "--bogus", "dist.ddp"], "muster run: error: unrecognized arguments: --bogus"),
        (["run", "--dry-run", "dist.ddp"], "unrecognized arguments: --dry-run; did you mean --dryrun?"),
        (["run", "-s", "local_cwd", "-s", "docker", "dist.ddp"], "-s is specified more than once"),
        (["doctor", "--devices", "many"], "'many' is not a number, 1 or more"),
        (["doctor", "--nproc", "many"], "'many' is not a number, 1 or more"),
        (["log", "a", "--grep", "("], "("),
        (["log", "a", "--rank", "-1"], "-1"),
        (["log", "a", "--stream", "all"], "all"),
    ],
)
def test_wrong_words(words, line, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == CommandExit.USAGE
    assert line in capsys.readouterr().err


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"muster {__version__}\n")


def test_equal_stacks_are_printed_once():
    stacks = (
        Stack(global_rank=0, node=0, local_rank=0, text="Thread 0x1 (most recent call first):\n  a"),
        Stack(global_rank=1, node=0, local_rank=1, text="Thread 0x2 (most recent call first):\n  a"),
        Stack(global_rank=2, node=0, local_rank=2, text="b"),
    )
    assert list(answers.format_stacks(stacks)) == [
        "stacks of ranks 0-1:",
        "  Thread 0x1 (most recent call first):",
        "    a",
        "stacks of rank 2:",
        "  b",
    ]


def test_who_waits_for_whom_is_printed_before_the_stacks(capsys):
    stack = Stack(global_rank=0, node=0, local_rank=0, text="b")
    answers.print_answer(Answer(outcome=AskOutcome.DONE, line="rank 1 is late", stacks=(stack,)), as_json=False)
    assert capsys.readouterr().out.splitlines() == ["rank 1 is late", "stacks of rank 0:", "  b"]


def test_roles_are_told_apart():
    """Each has a rank 0."""
    stack = Stack(global_rank=0, node=0, local_rank=0, text="a")
    late = LateRank(global_rank=0, step=4, silent_s=None)
    merged = merge_answers(
        {
            "actor": Answer(outcome=AskOutcome.LATE, line="rank 0 is late", ranks=1, stacks=(stack,), late=(late,)),
            "learner": Answer(outcome=AskOutcome.DONE, line="saved", ranks=2, stacks=(stack,)),
        }
    )
    assert (merged.outcome, merged.line) == (AskOutcome.LATE, "actor: rank 0 is late; learner: saved")
    assert [(each.role, each.global_rank) for each in merged.late] == [("actor", 0)]
    none = Answer(outcome=AskOutcome.LOST, line="no agent answers")
    unreached = merge_answers({"a": none, "b": Answer(outcome=AskOutcome.UNREACHED, line="cannot be asked"), "c": none})
    assert (unreached.outcome, get_exit_code(unreached)) == (AskOutcome.UNREACHED, CommandExit.LOST)
    assert list(answers.format_stacks(merged.stacks)) == [
        "stacks of actor, rank 0:",
        "  a",
        "stacks of learner, rank 0:",
        "  a",
    ]
