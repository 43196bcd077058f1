"""Every block of README, CONTRIBUTING, SKILL and docs/ runs: page by page, in order, in a copy of the repository.

There is no network and no standard input. Two programs are replaced, because the documentation's reader has another
machine: `make` prints what it would do, and `pip` installs nothing but looks whether the requirement is met by one of
the two environments of this repository.
"""

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys

import doc_pages
import pytest

from muster.agent.cli.command_line import parse_command_line
from muster.cli.commands import build_parser

BIN = os.path.dirname(sys.executable)
LIMIT_S = 240
PIP = """#!/bin/bash
shift 1
for python in {venv}/bin/python {nightly}/bin/python; do
    "$python" -m pip install --dry-run --no-index --disable-pip-version-check "${{@/#./torchx-muster}}" && exit
done
exit 1
"""
MAKE = """#!/bin/sh
exec {make} --dry-run --always-make "$@" >/dev/null
"""


@pytest.fixture
def folder(tmp_path):
    """A copy of the repository, as a reader has it."""
    copy = doc_pages.copy_repository(tmp_path / "muster")
    (copy / "main.py").write_text("print('the script of the reader')\n")  # many lines name it
    (copy / ".venv" / "bin").mkdir(parents=True)
    (copy / ".venv" / "bin" / "activate").touch()  # of `make run`, which makes nothing here
    return copy


@pytest.fixture
def environment(tmp_path):
    """A reader's environment: no TorchX or muster variable, a home of its own."""
    programs = tmp_path / "bin"
    programs.mkdir()
    root = doc_pages.ROOT
    for name, text in {"pip": PIP, "make": MAKE}.items():
        values = {"venv": root / ".venv", "nightly": root / ".venv-nightly", "make": shutil.which("make")}
        (programs / name).write_text(text.format(**values))
        (programs / name).chmod(0o755)
    kept = {name: os.environ[name] for name in ("LANG", "TMPDIR", "USER") if name in os.environ}
    home = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / ".local/state"), "OMP_NUM_THREADS": "1"}
    return {**kept, **home, "PATH": f"{programs}:{BIN}:/usr/bin:/bin:/usr/sbin:/sbin"}


@pytest.mark.long
@pytest.mark.timeout(900)  # a page may have several jobs, and the machine may be busy
@pytest.mark.parametrize("page", doc_pages.list_pages())
def test_blocks_run_or_are_marked(page, folder, environment):
    blocks = doc_pages.read_blocks(page)
    try:
        for block in blocks:
            assert block.mark in ("", *doc_pages.MARKS), f"{block.where}: {block.mark!r} is no mark of a block"
            if block.language in doc_pages.DRAWINGS:
                continue
            assert block.language in doc_pages.RUNNABLE, f"{block.where}: nothing runs {block.language!r}"
            if block.file is not None:
                _write_file(block, blocks, folder)
            elif block.mark:
                _check_marked(block)
            elif not block.is_dry_run:  # those come together, below
                _run_block(block, folder, environment)
    finally:
        _end_apps(folder, environment)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_dry_runs_and_marked_lines(tmp_path, environment):
    pages = [block for page in doc_pages.list_pages() for block in doc_pages.read_blocks(page)]
    blocks = [block for block in pages if block.language == "bash" and (block.mark or block.is_dry_run)]
    lines = [line for block in blocks for line in block.commands if line.startswith("torchx run ")]
    folder = tmp_path / "small"  # it is packed for each line
    folder.mkdir()
    for script in re.findall(r"--script (\S+)", "\n".join(lines)):
        (folder / script).parent.mkdir(parents=True, exist_ok=True)
        (folder / script).touch()
    runner = [sys.executable, str(doc_pages.ROOT / "tests/programs/docs_dry_runs.py")]
    _run(runner, "a dry run", folder, environment, text="\n".join(lines) + "\n")


def _write_file(block, blocks, folder):
    below = "".join(each.text for each in blocks if each.line > block.line and each.language == "bash")
    assert block.file in below, f"{block.where}: no command below uses {block.file}"
    compile(block.text, block.where, "exec")
    path = folder / block.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text)


def _run_block(block, folder, environment):
    if block.language == "yaml":
        yaml = pytest.importorskip("yaml")
        assert all(yaml.safe_load_all(block.text))
    elif block.language == "ini":
        configparser.ConfigParser().read_string(block.text)
    else:
        command = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}[block.language]
        said = _run([*command, block.text], block.where, folder, environment)
        assert said or not block.text.startswith("python "), f"{block.where} prints nothing"
        for name in re.findall(r"> (\S+\.yaml)$", block.text, re.MULTILINE):
            yaml = pytest.importorskip("yaml")
            written = list(yaml.safe_load_all((folder / name).read_text()))
            assert all(isinstance(each, dict) for each in written), f"{block.where}: {name} is not for kubectl"


def _check_marked(block):
    """What can be checked at once of a block that needs more than this machine; its dry runs come together, below."""
    if block.language == "python":
        compile(block.text, block.where, "exec")
        return
    for words in (shlex.split(line) for line in block.commands):
        if words[0] == "muster-agent" and words[1:2] != ["ask"]:
            assert parse_command_line(words[1:]).script, f"{block.where}: no script in {words}"
        elif words[0] == "muster":
            build_parser().parse_args(words[1:])


def _run(command, where, folder, environment, text=None):
    source = {"stdin": subprocess.DEVNULL} if text is None else {"input": text}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, **source
    )
    assert done.returncode == 0, f"{where} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _end_apps(folder, environment):
    """A block that failed may have left an app that nobody waits for."""
    apps = folder.parent / ".local/state/muster/logs/torchx"
    for app in apps.glob("*") if apps.exists() else ():
        handle = f"detached://torchx/{app.name}"
        subprocess.run(["torchx", "cancel", handle], env=environment, cwd=folder, capture_output=True, timeout=LIMIT_S)
