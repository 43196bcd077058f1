"""The table of the commands: what follows from one row and its module."""

import argparse
import inspect
import sys
from collections.abc import Sequence
from functools import partial
from typing import get_type_hints

import pytest

from muster.cli import commands, operations, run_command
from muster.cli.commands import COMMANDS, Command, build_parser, find_function, list_parsers, main, watch
from muster.cli.commands.completion import build_completion
from muster.cli.log_command import LogQuery
from muster.cli.rehearse.command import Request

RECORDS = {"run": run_command.RunOptions, "log": LogQuery, "rehearse": Request}
"""What has the options of commands with many."""


def test_a_new_command_is_one_function_and_one_row(monkeypatch, capsys):
    def add_where(parser):
        parser.add_handle()
        parser.add_role()
        parser.add_json()
        parser.set_defaults(run=lambda *, handle, role, as_json: print(handle, role, as_json) or 4)

    monkeypatch.setattr(watch, "add_where", add_where, raising=False)
    monkeypatch.setitem(COMMANDS, "where", Command("watch", "name the machines of a job"))
    assert main(["where", "train", "--json"]) == 4
    assert capsys.readouterr().out == "train None True\n"
    for words in (["--help"], ["where", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            main(words)
        assert "name the machines" in capsys.readouterr().out
    for shell in ("bash", "zsh", "fish"):
        row = next(line for line in build_completion(shell).splitlines() if "where" in line and "--role" in line)
        assert "--json" in row
    with pytest.raises(SystemExit, match="2"):
        main(["wheer"])
    assert "mean 'where'?" in capsys.readouterr().err


def test_only_the_module_of_its_group_is_loaded(monkeypatch):
    loaded = []
    monkeypatch.setattr(commands, "import_module", lambda name: loaded.append(name) or sys.modules[name])
    build_parser()  # all are in `sys.modules`
    for words, names in ((["--help"], []), (["stop", "x"], ["muster.cli.commands.control"])):
        loaded.clear()
        build_parser(words)
        assert loaded == names


def test_the_help_has_every_command_on_one_line_in_five_groups(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    found = []
    for title in ("Run", "Watch", "Control", "Afterwards", "Set up"):
        lines = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0].splitlines()
        assert max(map(len, lines)) <= 80
        found += [tuple(line.split(maxsplit=1)) for line in lines]
    assert found == [(name, command.text) for name, command in COMMANDS.items()]


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_parsed_has_a_place_and_a_type(name):
    """The function of a command is called with what was parsed, which mypy cannot see."""
    parser = list_parsers(build_parser())[name]
    run = find_function(parser.get_default("run"))
    types = get_type_hints(RECORDS[name]) if name in RECORDS else {}
    bound = run.args if isinstance(run, partial) else ()
    for function in (run, getattr(operations, bound[0]) if bound == (name,) else run):
        hints = get_type_hints(getattr(function, "func", function))
        taken = [each for each in inspect.signature(function).parameters.values() if each.kind is not each.VAR_KEYWORD]
        types |= {each.name: hints[each.name] for each in taken}
    parsed = {action.dest: action for action in parser._actions if action.dest != "help"}
    assert set(types) == set(parsed)
    for dest, action in parsed.items():
        if isinstance(action, argparse._StoreTrueAction):
            assert types[dest] is bool
        elif action.nargs in (argparse.REMAINDER, argparse.PARSER) or isinstance(action, argparse._AppendAction):
            assert types[dest] in (list[str], Sequence[str])
        else:
            kind = str if action.type is None else get_type_hints(action.type)["return"]
            assert types[dest] == (kind | None if action.default is None and not action.required else kind), dest


def test_completion_knows_options_and_names_of_jobs():
    words = {name: parser.list_words() for name, parser in list_parsers(build_parser()).items()}
    assert "--limit" in words["stop"]
    assert "--help-all" in words["run"]
    assert words["completion"] == ["--help", "bash", "zsh", "fish", "apps"]
    asking = {name for name, parser in list_parsers(build_parser()).items() if parser.names_app}
    assert {"status", "stop", "exec", "release"} <= asking
    assert not asking & {"run", "hold", "list", "doctor"}
