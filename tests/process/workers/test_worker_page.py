"""`muster.worker` in real workers: importable wherever the agent comes from, and read by the agent."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from harness import PROGRAMS, ROOT, Tree, run_tree
from launchers import ONE_START

import muster
from muster.schedulers.bundle import build_agent_bundle

PROGRAM = PROGRAMS / "workers_steps.py"
PACKAGE = ROOT / "muster"
STARTS = [ONE_START] if ONE_START else ["cold", "warm"]
FLAGS = ["--standalone", "--nproc-per-node", "2"]


def build_command(*words: str, start: str = "cold", python: tuple[str, ...] = (), agent: str = "") -> list[str]:
    entry = [agent] if agent else ["-m", "muster.agent"]
    preload = ["--preload", "json"] if start == "warm" else []
    return [sys.executable, *python, *entry, *FLAGS, "--start", start, *preload, *words]


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The zip, not unpacked: `test_bundle_start` has that."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    path = tmp_path / "muster-agent.zip"
    path.write_bytes(build_agent_bundle())
    return str(path)


@pytest.mark.parametrize(
    ("how", "start"),
    [("raise", STARTS[0]), ("raise", "command"), *((how, STARTS[-1]) for how in ("fork", "second", "killed"))],
)
def test_the_report_has_the_last_step_of_the_rank_and_of_no_other_process(how: str, start: str) -> None:
    words = ("--no-python", sys.executable) if start == "command" else ()
    command = build_command(*words, str(PROGRAM), how, start="cold" if words else start)
    outcome = run_tree(command).check(1)
    assert "step      : 7 of 10" in outcome.stderr, outcome.explain()


FAILS_AT_ITS_CHECKPOINT = """
import sys
from muster import worker
for step in range(int(worker.resume_path() or 0), 9):
    if step == 4:
        raise ValueError("again")
    worker.step(step)
    if step == 3:
        worker.saved(step, "4")
"""


def test_the_report_of_a_rank_that_fails_before_its_first_step_says_what_was_saved(tmp_path: Path) -> None:
    """It resumed at the step that fails. Whether the report had a step depended on when the last save was."""
    script = tmp_path / "fails.py"
    script.write_text(FAILS_AT_ITS_CHECKPOINT)
    outcome = run_tree(build_command("--max-restarts", "1", str(script))).check(1)
    assert "saved step is 3" in outcome.stderr, outcome.explain()


@pytest.mark.parametrize("start", STARTS[-1:])
def test_stacks_on_request_come_with_the_steps(start: str) -> None:
    with Tree(build_command("--tee", "3", str(PROGRAM), "waits", start=start)) as tree:
        tree.wait_for_line("waiting", count=2)
        agent = next(pid for pid in tree.children() if pid)
        tree.send(signal.SIGUSR2, agent)
        tree.wait_for_line("ranks 0-1: step 7 of 10", stream="stderr")


@pytest.mark.parametrize(
    "start", [start if start == STARTS[-1] else pytest.param(start, marks=pytest.mark.long) for start in STARTS]
)
def test_a_worker_that_only_steps_does_not_hang(start: str) -> None:
    run_tree(build_command("--hang-timeout", "3", str(PROGRAM), "steps", start=start)).check()


# -- where the package comes from -------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [*STARTS, "command"])
def test_without_muster_in_the_image_the_bundle_has_it(bundle: str, program: str) -> None:
    command = program == "command"
    words = ("--no-python", sys.executable, "-S") if command else ()
    start = "cold" if command else program
    argv = build_command(*words, str(PROGRAM), "where", start=start, python=("-S",), agent=bundle)
    outcome = run_tree(argv, env={**os.environ, "PYTHONPATH": ""} if command else None)
    assert outcome.stdout.count(f"muster is {bundle}/muster/__init__.py, managed True") == 2, outcome.explain()


@pytest.mark.parametrize(
    ("version", "start"), [("0.0.9", STARTS[0]), ("0.1.0", STARTS[-1]), ("", STARTS[0]), (None, STARTS[-1])]
)
def test_the_jobs_own_is_imported_and_not_an_installed_one(
    tmp_path: Path, bundle: str, start: str, version: str | None
) -> None:
    """An older one in the image has a `muster.worker` that this agent may not understand; None: it is not whole."""
    site = tmp_path / "site"
    shutil.copytree(PACKAGE, site / "muster", ignore=shutil.ignore_patterns("__pycache__", "agent", "schedulers"))
    if version is None:
        (site / "muster" / "__init__.py").unlink()
    else:
        (site / "muster" / "__init__.py").write_text(f'__version__ = "{version}"\n' if version else "")
    (site / "muster" / "worker.py").write_text("raise RuntimeError('the installed one')\n")
    command = build_command(str(PROGRAM), "where", start=start, python=("-S",), agent=bundle)
    outcome = run_tree(command, env={**os.environ, "PYTHONPATH": str(site)})
    assert outcome.stdout.count(f"muster is {bundle}/muster/__init__.py, managed True") == 2, outcome.explain()
    other = version or "an unknown version"
    line = f"gives {muster.__version__}, which came with the job, not {other} of {site}"
    assert " ".join(outcome.stderr.split()).count(line) == (version != muster.__version__), outcome.explain()


def test_a_command_gets_the_bundles_modules_and_an_installed_packages_others(tmp_path: Path, bundle: str) -> None:
    site = tmp_path / "site"
    shutil.copytree(PACKAGE, site / "muster", ignore=shutil.ignore_patterns("__pycache__", "agent", "schedulers"))
    script = tmp_path / "main.py"
    script.write_text(
        "import muster.worker, muster.components\n"
        "print(f'{muster.worker.__file__} {muster.components.__file__}\\n', end='', flush=True)\n"
    )
    code = f"import sys; sys.path.append({str(site)!r}); import runpy; runpy.run_path({str(script)!r})"
    command = build_command("--no-python", sys.executable, "-S", "-c", code, python=("-S",), agent=bundle)
    outcome = run_tree(command, cwd=tmp_path)
    assert outcome.stdout.count(f"{bundle}/muster/worker.py {site}/muster/components/__init__.py") == 2, (
        outcome.explain()
    )
    assert "no longer written" not in outcome.stderr, outcome.explain()


@pytest.mark.parametrize("reach", ["installed", "script", "command"])
def test_a_foreign_package_of_that_name_is_the_programs(tmp_path: Path, bundle: str, reach: str) -> None:
    """Of one that is installed a line says so."""
    site = tmp_path / "site"
    (site / "muster").mkdir(parents=True)
    (site / "muster" / "__init__.py").write_text("FOREIGN = 'yes'\n")
    (site / "muster" / "part.py").write_text("PART = 'of it'\n")
    script = tmp_path / "main.py"
    added = "" if reach == "installed" else f"import sys; sys.path.append({str(site)!r})\n"
    shown = "sys.stdout.write(f'foreign {muster.FOREIGN} {muster.part.PART}\\n')"
    script.write_text(f"{added}import sys, muster, muster.part; {shown}\n")
    if reach == "script":  # beside the script
        shutil.copytree(site / "muster", tmp_path / "muster")
    program = ("--no-python", sys.executable, "-S") if reach == "command" else ()
    command = build_command(*program, str(script), python=("-S",), agent=bundle)
    outcome = run_tree(command, env={**os.environ, "PYTHONPATH": str(site) if reach == "installed" else ""})
    assert outcome.stdout.count("foreign yes of it") == 2, outcome.explain()
    line = f"that name, in {site}, "
    assert " ".join(outcome.stderr.split()).count(line) == (reach == "installed"), outcome.explain()
