"""The grammar of the command line: against torchrun's own parser where torch is installed, and by tables."""

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import cast
from unittest import mock

import pytest

from muster.agent.cli.command_line import FlagValues, find_flag, parse_command_line
from muster.agent.cli.flag_table import Flag, list_flags, list_groups
from muster.agent.cli.help_text import format_help, format_help_all
from muster.agent.errors import UsageError

TORCHRUNS = [flag for flag in list_flags() if not flag.ours]
VALUE = {
    "nnodes": "1:3",
    "start-method": "fork",
    "numa-binding": "node",
    "max-restarts": "4",
    "monitor-interval": "2.5",
    "node-rank": "2",
    "master-port": "4711",
    "shutdown-timeout": "7",
    "duplicate-stdout-filters": "a,,b,c",
    "duplicate-stderr-filters": "x",
}


def value_of(flag: Flag) -> str:
    return VALUE.get(flag.name, "some")


@functools.cache
def torchruns_parser(env: tuple[tuple[str, str], ...] = ()) -> argparse.ArgumentParser:
    """Return the installed torch's parser with what torch 2.15.0 added. It reads its variables when it is built."""
    with mock.patch.dict(os.environ, dict(env)):
        parser = build_installed_parser()
        if "--print-completion" not in parser._option_string_actions:
            from torch.distributed.argparse_util import env as from_variable

            names = ("--log-line-prefix-template", "--log_line_prefix_template")
            parser.add_argument(*names, action=from_variable, type=str, default="")
            choices = ["bash", "zsh", "tcsh"]
            parser.add_argument("--print-completion", "--print_completion", choices=choices)  # it prints, and exits
        return parser


def build_installed_parser() -> argparse.ArgumentParser:
    return cast("argparse.ArgumentParser", pytest.importorskip("torch.distributed.run").get_args_parser())


def torchruns_namespace(argv: list[str], **env: str) -> dict[str, object]:
    return vars(torchruns_parser(tuple(env.items())).parse_args(argv))


def ours(argv: list[str], **env: str) -> dict[str, object]:
    """Our values in the shape of torchrun's namespace: numbers and lists converted as its parser does."""
    line = parse_command_line(argv)
    values = FlagValues(line.texts, env)
    found: dict[str, object] = {"training_script": line.script, "training_script_args": list(line.script_args)}
    for flag in TORCHRUNS:
        if values.is_given(flag.name):
            found[flag.dest] = values.switch(flag.name) if flag.is_switch else values.text(flag.name)
    return found


def assert_same(argv: list[str], **env: str) -> None:
    theirs = torchruns_namespace(argv, **env)
    for name, value in ours(argv, **env).items():
        expected = theirs[name]
        if name.startswith("duplicate_"):
            from muster.agent.cli.arguments import parse_texts

            assert list(parse_texts(str(value))) == expected
        elif isinstance(expected, (list, bool)):
            assert value == expected, name
        else:
            assert str(value) == str(expected), name


@pytest.mark.torch
def test_the_table_has_every_flag_of_torchruns_parser_and_no_other() -> None:
    theirs = {
        (action.dest, action.nargs == 0, short[1:])
        for action in torchruns_parser()._actions
        if action.option_strings and action.dest != "help"
        for short in [next((s for s in action.option_strings if not s.startswith("--")), "-")]
    }
    import torch

    read = f"torchrun of torch {torch.__version__}, with what 2.15.0 added"
    assert {(flag.dest, flag.is_switch, flag.short) for flag in TORCHRUNS} == theirs, read


@pytest.mark.torch
@pytest.mark.parametrize("flag", [f for f in TORCHRUNS if f.name != "print-completion"], ids=lambda flag: flag.name)
def test_every_spelling_means_what_it_means_in_torchrun(flag: Flag) -> None:
    tail = ["train.py", "--lr", "1", "-m"]
    value = [] if flag.is_switch else [value_of(flag)]
    spellings = [f"--{flag.name}", "--" + flag.dest] + ([f"-{flag.short}"] if flag.short else [])
    for spelling in spellings:
        assert ours([spelling, *value, *tail])[flag.dest]
        assert_same([spelling, *value, *tail])
        if value:
            assert_same([f"{spelling}={value[0]}", *tail])
    if flag.short and value:
        assert_same([f"-{flag.short}{value[0]}", *tail])
        assert_same([f"-m{flag.short}", value[0], *tail])


def abbreviations() -> Iterator[tuple[str, Flag]]:
    for flag in TORCHRUNS:
        for spelling in {flag.name, flag.dest}:
            for length in range(1, len(spelling)):
                yield "--" + spelling[:length], flag


@pytest.mark.torch
@pytest.mark.parametrize("build", [build_installed_parser, torchruns_parser])
def test_every_abbreviation_that_torchrun_takes_means_the_same(build: Callable[[], argparse.ArgumentParser]) -> None:
    parser = build()
    taken = 0
    for spelling, _ in abbreviations():
        actions = {id(found[0]): found[0] for found in parser._get_option_tuples(spelling)}
        if spelling in parser._option_string_actions or len(actions) != 1:
            continue
        # Where two spellings of one flag match, Python 3.11 still refuses: we take it, as 3.13 does.
        [action] = actions.values()
        if action.dest == "help":
            continue
        if spelling != "--start":  # ours has that name; see test_arguments for its values
            assert find_flag(spelling).dest == action.dest, spelling
            taken += 1
    assert taken > 200


@pytest.mark.torch
@pytest.mark.parametrize("flag", [f for f in TORCHRUNS if f.has_variable], ids=lambda flag: flag.name)
def test_every_variable_is_a_default_that_the_flag_beats(flag: Flag) -> None:
    if flag.is_switch:
        for text in ("0", "1", "2"):
            assert_same(["train.py"], **{flag.variable: text})
        assert_same([f"--{flag.name}", "train.py"], **{flag.variable: "0"})
        return
    assert ours(["train.py"], **{flag.variable: value_of(flag)})[flag.dest] == value_of(flag)
    assert_same(["train.py"], **{flag.variable: value_of(flag)})
    other = "1" if flag.name in VALUE and VALUE[flag.name].isdecimal() else value_of(flag)
    assert_same([f"--{flag.name}", other, "train.py"], **{flag.variable: value_of(flag)})


@pytest.mark.torch
@pytest.mark.parametrize("flag", [f for f in TORCHRUNS if not f.has_variable], ids=lambda flag: flag.name)
def test_those_without_a_variable_have_none(flag: Flag) -> None:
    with_variable = torchruns_namespace(["train.py"], **{flag.variable: value_of(flag)})
    assert with_variable[flag.dest] is None
    assert flag.dest not in ours(["train.py"], **{flag.variable: value_of(flag)})


@pytest.mark.torch
@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "--nnodes", "2"],
        ["train.py", "--", "--nnodes"],
        ["train.py", "-h"],
        ["--", "train.py", "--x"],
        ["--rdzv-conf", "a b", "train.py"],
        ["--rdzv-conf=", "train.py"],
        ["--rdzv-conf", "", "train.py"],
        ["--rdzv-conf=--x=1", "train.py"],
        ["--rdzv-id", "-", "train.py"],
        ["--nnodes", "1", "--nnodes", "3", "train.py"],
        ["-mt3", "train.py"],
        ["-m", "-r", "0:1,1:2", "pkg.mod", "-t", "3"],
        ["--standalone", "--role=a=b", "train.py", "a", "--role", "c"],
    ],
    ids=" ".join,
)
def test_the_grammar_is_argparses(words: list[str]) -> None:
    if sys.version_info >= (3, 13) and "--" in words:
        pytest.skip("argparse of 3.13 treats -- otherwise; ours stays with what it does up to 3.12")
    assert_same(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "2", "train.py"], "unknown flag --nodes (did you mean --nnodes?)"),
        (
            ["--rdzv", "c10d", "train.py"],
            "--rdzv is ambiguous: --rdzv-backend, --rdzv-endpoint, --rdzv-id, --rdzv-conf",
        ),
        (["--standalone=1", "train.py"], "--standalone takes no value, got '1'"),
        (["--nnodes"], "--nnodes needs a value (N|MIN:MAX)"),
        (["--rdzv-conf", "--x", "t.py"], "got the flag '--x' (write --rdzv-conf=--x if that is the value)"),
        (["-x", "train.py"], "unknown flag -x in '-x'; the short flags are -m, -r, -t, -h"),
        (["-mq", "train.py"], "unknown flag -q in '-mq'"),
    ],
)
def test_a_wrong_word_gets_one_clear_line(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_command_line(words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_our_flags_never_shadow_an_abbreviation_of_torchruns() -> None:
    assert find_flag("--re").name == "redirects"
    assert find_flag("--star").name == "start-method"
    assert find_flag("--start").name == "start"
    assert find_flag("--rank0").name == "rank0-env"
    assert find_flag("--prel").name == "preload"
    assert find_flag("--log-").name == "log-dir"  # torch 2.15 has a second flag that begins so


HELP_LINES = 40
"""What a screen shows without scrolling, on most of them."""
IN_HELP = {
    *("nnodes", "nproc-per-node", "node-rank"),  # every command line has the first two
    *("standalone", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf"),  # torchrun's page shows jobs with these
    *("master-addr", "master-port"),  # launch lines of Slurm scripts, and torch.distributed.launch
    *("max-restarts", "module", "no-python"),
    *("log-dir", "redirects", "tee"),  # where the output is, the first question after a failure
}


@pytest.mark.parametrize("width", [80, 110])
def test_the_short_help_has_the_flags_that_people_use(width: int) -> None:
    lines = format_help(width).splitlines()
    assert len(lines) <= HELP_LINES
    assert max(map(len, lines)) <= width
    assert {found[1] for line in lines if (found := re.match(r"  (?:-\w, )?--([\w-]+)", line))} == IN_HELP
    assert "--help-all" in lines[-1]


@pytest.mark.parametrize("width", [80, 110])
def test_the_whole_help_has_every_flag_in_its_group(width: int) -> None:
    text = format_help_all(width)
    assert max(map(len, text.splitlines())) <= width
    for title, flags in list_groups():
        group = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        for flag in flags:
            assert re.search(rf"^  (-\w, )?--{flag.name}\b", group, re.MULTILINE), flag.name
            assert " ".join(flag.text.split()) in " ".join(group.split())
    assert "Feature snapshots" in dict(list_groups())
    assert "Has no effect:" in text


def test_what_asks_for_a_help() -> None:
    assert parse_command_line(["--nnodes", "2", "--help"]).wants_help
    assert parse_command_line(["--nnodes", "2", "--help-all"]).wants_help_all
    assert not parse_command_line(["train.py", "--help"]).wants_help
    assert parse_command_line(["--version"]).wants_version
    assert not parse_command_line(["train.py", "--version"]).wants_version
