"""Streams, files, prefixes, filters."""

from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Outcome
from launchers import Launcher

RunOnce = Callable[..., tuple[Outcome, Path]]


def files_below(folder: Path) -> dict[str, bytes]:
    """Log files by attempt, rank and name, without the run's own folder, which has another name each time."""
    return {
        str(path.relative_to(folder / path.relative_to(folder).parts[0])): path.read_bytes()
        for path in folder.glob("*/attempt_*/**/*.log")
    }


def run_talker(run_once: RunOnce, launcher: Launcher, *flags: str, **env: str) -> tuple[Outcome, dict[str, bytes]]:
    outcome, folder = run_once(
        launcher.name, ("--nproc-per-node", "2", "--log-dir", "logs", *flags), ("conf_talks.py",), **env
    )
    assert outcome.exit_code == 0, outcome.explain()
    return outcome, files_below(folder / "logs")


def test_by_default_everything_reaches_the_console(run_once: RunOnce, launcher: Launcher) -> None:
    outcome, files = run_talker(run_once, launcher)
    for rank in range(2):
        for text in (f"out {rank} line 0", f"out {rank} line 2", f"out {rank} unterminated"):
            assert text in outcome.stdout
        assert f"err {rank} line 0 plum" in outcome.stderr
    assert files == {}


FILES_OF_RANK_0 = {
    "attempt_0/0/stdout.log": b"out 0 line 0\nout 0 line 1 apple,pear\nout 0 line 2\nout 0 unterminated",
    "attempt_0/0/stderr.log": b"err 0 line 0 plum\n",
}


def test_redirects_go_to_files_only(run_once: RunOnce, launcher: Launcher) -> None:
    outcome, files = run_talker(run_once, launcher, "-r", "3")
    assert "out " not in outcome.stdout
    assert "err 0" not in outcome.stderr
    assert {name: files[name] for name in FILES_OF_RANK_0} == FILES_OF_RANK_0
    assert len(files) == 4


def test_redirects_by_rank(run_once: RunOnce, launcher: Launcher) -> None:
    outcome, files = run_talker(run_once, launcher, "--redirects", "0:1,1:2")
    assert set(files) == {"attempt_0/0/stdout.log", "attempt_0/1/stderr.log"}
    assert "out 1 line 2" in outcome.stdout
    assert "out 0" not in outcome.stdout
    assert "err 0" in outcome.stderr
    assert "err 1" not in outcome.stderr


def test_tee_goes_to_both_with_a_prefix(run_once: RunOnce, launcher: Launcher) -> None:
    outcome, files = run_talker(run_once, launcher, "--tee=3", "--role", "worker")
    assert {name: files[name] for name in FILES_OF_RANK_0} == FILES_OF_RANK_0
    for rank in range(2):
        prefix = f"[worker{rank}]:"
        for text in (f"out {rank} line 0", f"out {rank} line 1 apple,pear", f"out {rank} line 2"):
            assert f"{prefix}{text}\n" in outcome.stdout
        assert f"{prefix}err {rank} line 0 plum\n" in outcome.stderr


@pytest.mark.fault("lines", "one rank's unterminated last line runs into another's next line", recorded=True)
def test_lines_of_two_workers_never_share_one(run_once: RunOnce, launcher: Launcher) -> None:
    outcome, _ = run_talker(run_once, launcher, "--tee=3", "--role", "worker")
    lines = [line for line in outcome.stdout.splitlines() if line.startswith("[worker")]
    assert len(lines) == 8, outcome.stdout
    assert all(line.count("[worker") == 1 for line in lines), outcome.stdout


def test_the_last_line_needs_no_end(run_once: RunOnce, launcher: Launcher) -> None:
    outcome, _ = run_talker(run_once, launcher, "--tee=3", "--role", "worker")
    for rank in range(2):
        assert f"[worker{rank}]:out {rank} unterminated" in outcome.stdout


def test_filters_choose_ranks_and_copy_lines(run_once: RunOnce, launcher: Launcher) -> None:
    flags = ("-t", "3", "--local_ranks_filter", "1", "--duplicate-stdout-filters", "apple,,pear,line 2")
    outcome, files = run_talker(run_once, launcher, *flags, "--duplicate_stderr_filters=plum,nothing")
    assert "out 0" not in outcome.stdout
    assert "out 1 line 1" in outcome.stdout
    assert files["attempt_0/0/stdout.log"] == FILES_OF_RANK_0["attempt_0/0/stdout.log"]
    copied = files["attempt_0/filtered_stdout.log"].decode().splitlines()
    assert [line[-len("out 1 line 2") :] for line in copied if "line 2" in line] == ["out 1 line 2"]
    assert any("out 1 line 1 apple,pear" in line for line in copied)
    assert not any("line 0" in line for line in copied)
    assert b"err 1 line 0 plum" in files["attempt_0/filtered_stderr.log"]


def test_a_filtered_rank_is_hidden_without_redirection_too(run_once: RunOnce, launcher: Launcher) -> None:
    outcome, files = run_talker(run_once, launcher, "--local-ranks-filter", "1")
    assert "out 0" not in outcome.stdout
    assert "err 0" not in outcome.stderr
    assert "out 1 unterminated" in outcome.stdout
    assert files == {}


@pytest.mark.fault(13, "--tee 10:3 is refused: its pattern knows ranks of one digit")
def test_any_rank_can_be_named(run_once: RunOnce, launcher: Launcher) -> None:
    _, files = run_talker(run_once, launcher, "--tee", "0:3,10:3")
    assert set(files) == set(FILES_OF_RANK_0)


def test_a_template_for_the_prefix(run_once: RunOnce, launcher: Launcher) -> None:
    template = "<${role_name}|${rank}|${local_rank}|${what}> "
    outcome, _ = run_talker(run_once, launcher, "--tee", "3", TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=template)
    assert "<default|1|1|${what}> out 1 line 0\n" in outcome.stdout, outcome.explain()


def test_dev_null_keeps_no_files(launcher: Launcher, tmp_path: Path) -> None:
    outcome = launcher.run(["--nproc-per-node", "2", "--log-dir", "/dev/null"], ["conf_talks.py"]).check()
    assert "out 1 line 2" in outcome.stdout
    assert list(tmp_path.glob("**/*.log")) == []


def test_bytes_are_passed_through_to_the_file(launcher: Launcher, tmp_path: Path) -> None:
    outcome = launcher.run(["--tee", "3", "--log-dir", "logs"], ["conf_bytes.py"]).check()
    whole = b"begin \xff\xfe\x00 end\n" + b"x" * 300_000 + b"|\n"
    assert files_below(tmp_path / "logs") == {
        "attempt_0/0/stdout.log": whole,
        "attempt_0/0/stderr.log": b"",
    }
    assert "x" * 300_000 + "|" in outcome.stdout


@pytest.mark.fault("bytes", "what is not UTF-8 comes out as replacement characters")
def test_bytes_are_passed_through_to_the_console(launcher: Launcher) -> None:
    outcome = launcher.run(["--tee", "3"], ["conf_bytes.py"])
    assert b"begin \xff\xfe\x00 end" in outcome.stdout.encode(errors="surrogateescape"), outcome.stdout[:80]


def test_attempts_keep_their_files(launcher: Launcher, tmp_path: Path) -> None:
    launcher.run(["--max-restarts", "1", "-r", "3", "--log-dir", "logs"], ["conf_restarts.py", "1"]).check()
    files = files_below(tmp_path / "logs")
    for attempt in range(2):
        assert files[f"attempt_{attempt}/0/stdout.log"].startswith(f"attempt {attempt}".encode())


def test_events_on_the_console(launcher: Launcher) -> None:
    outcome = launcher.run(["--event-log-handler", "console"], ["conf_module.py"]).check()
    assert any(line.startswith("{") and line.endswith("}") for line in outcome.stderr.splitlines()), outcome.explain()


def test_the_default_logs_specs(launcher: Launcher, tmp_path: Path) -> None:
    launcher.run(["--logs-specs", "default", "-r", "1", "--log-dir", "logs"], ["conf_talks.py"]).check()
    assert set(files_below(tmp_path / "logs")) == {"attempt_0/0/stdout.log"}


@pytest.mark.fault("numa", "without a GPU --numa-binding ends with an error from torch.cuda")
def test_numa_binding_without_gpus(launcher: Launcher) -> None:
    outcome = launcher.run(["--numa-binding", "node"], ["conf_module.py"]).check()
    assert "module" in outcome.stdout
