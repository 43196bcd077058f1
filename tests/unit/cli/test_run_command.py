"""`muster run` before anything is submitted, and how the lines of its replicas are printed."""

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
from torchx.runner import config
from torchx.specs import AppState

from muster._shared.control import ControlError
from muster.cli import commands, run_command
from muster.cli.streaming import LinePrinter, add_prefix


@pytest.fixture(autouse=True)
def _signals_of_before() -> Iterator[None]:
    """A command that makes a scheduler handles SIGTERM and SIGHUP from then on."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize(
    ("words", "default", "found"),
    [
        (["dist.ddp", "-j", "1x2"], None, ("dist.ddp", ["-j", "1x2"])),
        (["--", "dist.ddp", "--x", "--", "--x"], None, ("dist.ddp", ["--x", "--", "--x"])),
        (["-j", "1x2"], "dist.ddp", ("dist.ddp", ["-j", "1x2"])),
        ([], "dist.ddp", ("dist.ddp", [])),
        (["a.py:f", "-", "-"], "dist.ddp", ("a.py:f", ["-", "-"])),
    ],
)
def test_a_component_and_its_arguments(words, default, found):
    assert run_command.split_component(words, default) == found


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "name a component, such as dist.ddp; or in .torchxconfig, section [cli:run], `component`"),
        (["dist.ddp", "-j", "1", "-j", "2"], "repeated arguments of the component: -j"),
    ],
)
def test_what_names_no_component_is_wrong_usage(words, line, capsys):
    with pytest.raises(SystemExit, match="2"):
        commands.main(["run", "--dryrun", *words])
    assert capsys.readouterr().err.splitlines()[-1] == f"muster: error: {line}"


@pytest.mark.parametrize("words", [["--steps=3"], ["--steps", "3"], ["--workspace", "code"], ["--gpu", "two"]])
def test_where_the_words_of_others_belong(words, capsys):
    with pytest.raises(ControlError) as caught:
        run_command.build_app("dist.ddp", ["--script", "main.py", *words])
    assert ["before the component" in str(caught.value), "follow `--`" in str(caught.value)] == [True, True]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--max-retries", "2"], "did you mean '--max_retries'?"),
        (["--max-retries=2", "--", "--steps", "3"], "did you mean '--max_retries'?"),
        (["--max-retries=2", "--hang-timeout=9"], "did you mean '--max_retries' and '--hang_timeout'?"),
        (["--nnodes", "2"], "use `-j NODESxPROCESSES`, for example -j 2x4"),
        (["--nproc-per-node=2"], "use `-j NODESxPROCESSES`, for example -j 2x4"),
        (["--nproc_per_node=2", "--nnodes=2"], "use `-j NODESxPROCESSES`, for example -j 2x4"),
        (["--scirpt", "a.py"], "did you mean '--script'?"),
        (["--max_restarts=2"], "did you mean '--max_retries'?"),
    ],
)
def test_an_option_of_the_component_that_is_misspelt(words, hint, capsys):
    with pytest.raises(ControlError) as caught:
        run_command.build_app("dist.ddp", ["--script", "main.py", *words])
    assert str(caught.value).startswith("arguments of dist.ddp: ")
    assert str(caught.value).endswith(f"; {hint}")
    assert "follow `--`" not in str(caught.value)
    assert capsys.readouterr().err == ""


def test_a_value_of_the_component_that_is_wrong_is_one_line(capsys):
    """Above it was a screen of usage."""
    assert commands.main(["run", "-s", "local_cwd", "dist.ddp", "--script", "main.py", "--gpu", "two"]) == 2
    line = "muster: arguments of dist.ddp: argument --gpu: invalid int value: 'two'; `muster run dist.ddp --help` lists"
    assert capsys.readouterr().err.startswith(f"{line} them; ")


def ask_for_help(words, capsys):
    with pytest.raises(SystemExit, match="0"):
        commands.main(["run", *words])
    return capsys.readouterr().out


@pytest.mark.torchx
def test_the_help_of_a_component_has_two_steps(capsys):
    short = ask_for_help(["dist.ddp", "--help"], capsys)
    assert "--script" in short
    assert "--snapshot_memory" not in short
    whole = ask_for_help(["dist.ddp", "-j", "2x4", "--help-all"], capsys)
    assert "--snapshot_memory" in whole
    assert ask_for_help(["utils.echo", "--help-all"], capsys) == ask_for_help(["utils.echo", "--help"], capsys)
    own = ask_for_help(["--help"], capsys)
    assert len(own.splitlines()) <= 40
    assert "`muster run dist.ddp --help`" in own
    assert ask_for_help(["--help-all"], capsys) == f"{own}\n{whole}"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("dist.dpd", "there is no component 'dist.dpd': did you mean 'dist.ddp'?"),
        ("ddp", "there is no component 'ddp': did you mean 'dist.ddp'?"),
        ("main.py", "there is no component 'main.py': dist.ddp runs a script: `muster run dist.ddp --script main.py`"),
        ("nowhere.py:train", "component nowhere.py:train: "),
        ("quite.else", "component quite.else: Component `quite.else` not found. "),
    ],
)
def test_a_component_that_does_not_exist_is_one_line(name, line):
    with pytest.raises(ControlError) as caught:
        run_command.build_app(name, ["--script", "main.py"])
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_a_scheduler_that_is_misspelt(capsys):
    assert commands.main(["run", "-s", "slrum", "dist.ddp"]) == 2
    assert capsys.readouterr().err.startswith("muster: there is no scheduler 'slrum'; there are: ")


@pytest.mark.torchx
def test_our_components_are_found_without_torchxs_search(monkeypatch):
    from muster.components import dist

    monkeypatch.setitem(sys.modules, "torchx.specs.finder", None)  # an import fails
    assert [run_command.find_function(f"dist.{name}") for name in ("ddp", "spmd", "torchrun")] == [
        dist.ddp,
        dist.spmd,
        dist.torchrun,
    ]


@pytest.mark.torchx
def test_another_packages_dist_wins_as_with_torchx(monkeypatch):
    points = [
        EntryPoint("dist", "muster.components.dist", "torchx.components"),
        EntryPoint("dist", "theirs.dist", "torchx.components"),
    ]
    monkeypatch.setattr(run_command, "entry_points", lambda group: points)
    assert run_command.find_our_dist() is None
    monkeypatch.setattr(run_command, "entry_points", lambda group: points[::-1])
    assert run_command.find_our_dist() is points[0]


RULE = "=" * 70 + "\n"
REPORT = [RULE, "JOB FAILED  a-1: rank 3 failed\n", "Root cause\n", RULE, "[muster] failed after 3 s\n"]


def print_lines(replicas):
    file = io.StringIO()
    printer = LinePrinter(file)
    printer.start([(role, index) for role, index in replicas], lambda role, index: replicas[role, index])
    return file, printer


def test_the_report_comes_after_the_lines_of_all_replicas():
    file, printer = print_lines({("t", 0): ["[t0]:a\n", *REPORT], ("t", 1): ["[t0|n1.r1]:late\n"]})
    assert printer.finish()
    text = file.getvalue()
    assert sorted(text[: -len("".join(REPORT))].splitlines()) == ["t/0 [t0]:a", "t/1 [t0|n1.r1]:late"]
    assert text.endswith("".join(REPORT))
    assert not printer.print_reports(), "it is printed once"


def test_a_report_after_which_the_job_goes_on_stays_where_it_was():
    file, printer = print_lines({("t", 0): [*REPORT, "[t0]:again\n"]})
    assert not printer.finish()
    assert file.getvalue() == "".join(f"t/0 {line}" for line in [*REPORT, "[t0]:again\n"])


def test_a_rule_of_a_script_is_a_line_like_others():
    lines = [RULE, "[t0]:x\n", RULE]
    file, printer = print_lines({("t", 0): lines})
    assert not printer.finish()
    assert file.getvalue() == "".join(f"t/0 {line}" for line in lines)


def test_what_a_reader_raises_is_raised():
    def read(role, index):
        raise ValueError("no such app")

    printer = LinePrinter(io.StringIO())
    printer.start([("t", 0)], read)
    with pytest.raises(ValueError, match="no such app"):
        printer.wait()


def test_lines_that_cannot_be_read_do_not_change_how_a_job_has_ended(capsys):
    def read(role, index):
        raise ValueError("no such app")

    printer = LinePrinter(io.StringIO())
    printer.start([("t", 0)], read)
    assert not printer.finish()
    assert ": no such app" in capsys.readouterr().err


def test_a_reader_that_does_not_end_is_given_up():
    never = threading.Event()
    printer = LinePrinter(io.StringIO())
    printer.start([("t", 0), ("t", 1)], lambda role, index: iter(never.wait, True))
    assert not printer.finish(0.1)
    never.set()


def test_a_line_that_is_drawn_anew_keeps_its_prefix():
    assert add_prefix("t/0 ", "50%\r100%\n") == "t/0 50%\rt/0 100%\n"
    assert add_prefix("t/0 ", "\r100%\n") == "\rt/0 100%\n"
    assert add_prefix("t/0 ", "dos\r\n") == "t/0 dos\r\n"


@pytest.mark.parametrize("is_attached", [False, True])
def test_only_a_job_that_goes_on_ends_the_command_without_the_line_about_an_interrupt(is_attached):
    """`close` has said that it goes on; "interrupted" below it sounded as if the job were."""

    def wait(app_id, limit_s):
        raise KeyboardInterrupt

    running = SimpleNamespace(
        app_id="a", state=AppState.RUNNING, msg="", roles=[], roles_statuses=[], structured_error_msg=""
    )
    scheduler = SimpleNamespace(describe=lambda app_id: running, wait_ended=wait, close=list, backend="fake")
    follow = run_command._follow
    if is_attached:
        with pytest.raises(KeyboardInterrupt):
            follow(scheduler, "a", is_attached=True, shows_lines=False)
    else:
        assert follow(scheduler, "a", is_attached=False, shows_lines=False) == 130


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"[dist.ddp]\nj=1x1\nj=1x2\n", "option 'j' in section 'dist.ddp' already exists"),
        (b"j=1x1\n", "File contains no section headers"),
        (b"[cli:run]\nworkspace=%(x)s\n", "Bad value substitution: option 'workspace' in section 'cli:run'"),
        (b"[cli:run]\nworkspace=50%\n", "'%' must be followed by '%' or '('"),
        (b"[local_cwd]\nlog_dir=a\0b\n", "it has a NUL character"),
        (b"[local_cwd]\nlog_dir=\xff\n", "can't decode byte 0xff"),
        (b"#" * (5 << 20), "it is larger than 4194304 bytes"),
        ("pipe", "it is not a regular file"),
        ("folder", "Is a directory"),
        ("missing", "does not exist or is not a file"),
    ],
)
def test_a_configuration_that_torchx_cannot_read_is_one_line(content, problem, tmp_path, monkeypatch, capsys):
    path = tmp_path / ".torchxconfig"
    monkeypatch.setattr(config, "DEFAULT_CONFIG_DIRS", [str(tmp_path)])
    if content == "pipe":
        os.mkfifo(path)
    elif content == "folder":
        path.mkdir()
    elif content == "missing":
        monkeypatch.setenv("TORCHXCONFIG", str(path))
    else:
        path.write_bytes(content)
    for words in (["run", "--dryrun", "dist.ddp", "--script", "main.py"], ["hold"]):
        assert commands.main(words) == 1
        line = capsys.readouterr().err
        assert problem in line
        assert ".torchxconfig" in line
        assert line.count("\n") == 1


def test_a_value_of_a_section_that_is_of_another_type_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / ".torchxconfig").write_text("[slurm]\nspares=maybe\n")
    monkeypatch.setattr(config, "DEFAULT_CONFIG_DIRS", [str(tmp_path)])
    assert commands.main(["run", "--dryrun", "-s", "slurm", "dist.ddp", "--script", "main.py"]) == 1
    assert ["'spares'" in (err := capsys.readouterr().err), "'maybe'" in err] == [True, True]


def test_pairs_of_a_component_that_are_none_are_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "from typing import Dict\nfrom torchx import specs\n"
        "def job(pairs: Dict[str, str]) -> specs.AppDef:\n    return specs.AppDef('a')\n"
    )
    monkeypatch.chdir(tmp_path)
    for component, option in (("dist.ddp", "-m a --metadata"), ("mine.py:job", "--pairs")):
        assert commands.main(["run", "--dryrun", component, *option.split(), "foo"]) == 1
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith(f"muster: component {component}: ")
        assert "foo" in line
