"""Texts that people who tried muster called good: whoever changes their words changes this table, too."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from doubles.samples import make_failure_of_rank_3

import muster_entry
from muster._shared.reports import OomEvidence, Report, Stack
from muster.agent.diagnosis.report_text import format_report
from muster.cli.commands import _refuse_command
from muster.schedulers.wording.reasons import Code, Reason
from muster.schedulers.wording.words import word

GOLDEN = Path(__file__).with_name("praised_lines.txt")


make_failure = partial(make_failure_of_rank_3, step=812, total_steps=1000)


def build_crash() -> Report:
    trace = 'Traceback (most recent call last):\n  File "/w/main.py", line 3, in <module>\nValueError: boom'
    root = make_failure(exit_code=1, exception="ValueError: boom", traceback=trace, stderr_tail=("loading",))
    other = make_failure(node=0, node_index=0, host="host-a", global_rank=0, signal="SIGTERM", collateral=True)
    reason = "rank 3 on node 1 (host-b) exited with code 1 (ValueError: boom); no restarts are left"
    return Report(run_id="job", reason=reason, attempt=1, max_restarts=1, failures=(root, other))


def build_hang() -> Report:
    root = make_failure(hung=True, blocking="did not enter all_reduce #101", reason="no step for 60 s")
    waits = make_failure(node=0, node_index=0, global_rank=0, hung=True, reason="no step for 60 s", collateral=True)
    stack = Stack(global_rank=3, node=1, local_rank=1, text='  File "/w/data.py", line 7 in wait')
    return Report(run_id="job", reason="rank 3 did not enter all_reduce #101", failures=(root, waits), stacks=(stack,))


def build_oom() -> Report:
    oom = OomEvidence(certain=True, limit_bytes=4 << 30, peak_bytes=4 << 30, source="/sys/fs/cgroup/memory.events")
    return Report(
        run_id="job", reason="rank 3 was ended by SIGKILL", failures=(make_failure(signal="SIGKILL", oom=oom),)
    )


def read_foreign_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    foreign = SimpleNamespace(origin="/home/me/muster/__init__.py", submodule_search_locations=["/home/me/muster"])
    monkeypatch.setattr(muster_entry.importlib.util, "find_spec", lambda _name: foreign)
    with pytest.raises(SystemExit):
        muster_entry.__getattr__("run_command")
    return capsys.readouterr().err.strip()


def test_praised_texts_stay(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told = {
        "the failure report": format_report(build_crash()),
        "the hang page": format_report(build_hang()),
        "the report of a kill for want of memory": format_report(build_oom()),
        "the line of a container without memory": word(Reason(code=Code.OUT_OF_MEMORY, limit="2Gi")),
        "did you mean": _refuse_command("statuz"),
        "a foreign muster/": read_foreign_line(monkeypatch, capsys),
    }
    shown = "".join(f"== {name}\n{text.rstrip()}\n" for name, text in told.items())
    assert shown == GOLDEN.read_text()
