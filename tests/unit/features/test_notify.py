"""Which event `--notify` tells, on which node, and with what."""

from pathlib import Path

import pytest
from doubles.samples import make_round

from muster._shared.layouts import StatusPageLayout as Layout
from muster._shared.reports import Report
from muster.agent.cli.arguments import parse_args
from muster.agent.features.notify.decisions import Notification, NotifyStory
from muster.agent.features.notify.sink import build_env, read_step
from muster.agent.node.actions import Finish
from muster.agent.rendezvous.interface import (
    BreakKind,
    DrainBegun,
    DrainCommitted,
    JobEnded,
    Notice,
    NoticeKind,
    RendezvousFailed,
    RoundBroken,
)

FIRST, SECOND = make_round(2, group_rank=0), make_round(2, group_rank=1)
REPORT = Report(reason="rank 1 exited with code 3")


def end(finish: Finish, *, is_first: bool = True, is_agreed: bool = True) -> tuple[str, str, int | None] | None:
    story = NotifyStory(is_agreed=is_agreed)
    told = story.end(finish, FIRST if is_first else SECOND, is_first=is_first, line="succeeded", page="PAGE")
    return None if told is None else (told.event, told.text, told.exit_code)


def test_the_job_s_end() -> None:
    assert end(Finish(code=0, ended=JobEnded(succeeded=True))) == ("ended", "succeeded", 0)
    assert end(Finish(code=0, ended=JobEnded(succeeded=True)), is_first=False) is None
    assert end(Finish(code=143, ended=JobEnded(succeeded=False, is_drained=True))) == ("preempted", "succeeded", 143)
    assert end(Finish(code=143)) == ("preempted", "succeeded", 143)
    assert end(Finish(code=130)) == ("stopped", "succeeded", 130)
    assert end(Finish(code=130), is_first=False) is None
    assert end(Finish(code=69)) is None, "this node leaves the job, which may go on"


def test_a_failure_is_told_by_the_node_that_prints_the_report() -> None:
    printed = Finish(code=1, ended=JobEnded(succeeded=False, report=REPORT, prints_report=True))
    silent = Finish(code=1, ended=JobEnded(succeeded=False, report=REPORT))
    assert end(printed, is_first=False) == ("failed", "PAGE", 1)
    assert end(silent) is None
    assert end(silent, is_agreed=False) == ("failed", "PAGE", 1), "with torch's handlers: the first node"
    assert end(printed, is_first=False, is_agreed=False) is None


def test_nodes_that_do_not_find_each_other() -> None:
    failed = RendezvousFailed(reason="nobody came")
    assert end(Finish(code=69, rendezvous_failed=failed)) == ("failed", "nobody came", 69)
    assert end(Finish(code=69, rendezvous_failed=failed), is_first=False) is None
    assert end(Finish(code=2, rendezvous_failed=failed)) is None, "this node was refused"


@pytest.mark.parametrize(("is_asked", "at_once", "event"), [(False, "preempted", "preempted"), (True, None, "stopped")])
def test_a_drain_and_a_signal_to_ranks_that_find_no_common_step(is_asked: bool, at_once, event: str) -> None:
    story = NotifyStory(is_agreed=True)
    story.read(DrainBegun(round_number=FIRST.number, drain=1, limit_s=10.0, is_asked=is_asked), FIRST)
    told = story.read(DrainCommitted(round_number=FIRST.number, drain=1, step=7), FIRST)
    assert (told and (told.event, told.step)) == (at_once and (at_once, 7))
    ended = Finish(code=143, ended=JobEnded(succeeded=False, is_drained=True))
    last = story.end(ended, FIRST, is_first=True, line="stopped", page="")
    assert last.event == event
    assert told is None or told.key == last.key, "it is told once"
    story = NotifyStory(is_agreed=True)
    story.read(DrainBegun(round_number=FIRST.number, drain=1, limit_s=10.0, is_asked=is_asked), FIRST)
    assert story.end(Finish(code=143), FIRST, is_first=True, line="stopped", page="").event == event


def test_a_checkpoint_tells_nothing_nor_does_another_node() -> None:
    for kind, current in ((Layout.CHECKPOINT, FIRST), (Layout.PAUSE, FIRST), (Layout.STOP, SECOND)):
        story = NotifyStory(is_agreed=True)
        story.read(DrainBegun(round_number=current.number, drain=1, limit_s=10.0, kind=kind), current)
        assert story.read(DrainCommitted(round_number=current.number, drain=1, step=7), current) is None


def test_a_hang_with_which_the_job_goes_on_is_told_once_with_its_page() -> None:
    story = NotifyStory(is_agreed=True)
    kinds = (NoticeKind.STILL, NoticeKind.HANG, NoticeKind.HANG, NoticeKind.STACK)
    for number, kind in enumerate(kinds):
        story.read(Notice(text=f"line {number}", kind=kind), FIRST)
    told = story.build_hang(FIRST)
    assert (told.event, told.reason, told.text) == ("hang", "line 1", "line 1\nline 2\nline 3")
    story.read(Notice(text="again", kind=NoticeKind.HANG), FIRST)
    assert story.build_hang(FIRST) is None
    story.read(Notice(text="it goes on", kind=NoticeKind.HANG_OVER), FIRST)
    story.read(Notice(text="another", kind=NoticeKind.HANG), FIRST)
    other = story.build_hang(FIRST)
    assert other.key != told.key


def test_a_hang_that_ends_the_round() -> None:
    def read(kind: BreakKind, *, is_hang: bool = True, is_leader: bool = True) -> str | None:
        broken = RoundBroken(
            round_number=FIRST.number, kind=kind, reason="it hangs", is_hang=is_hang, is_leader=is_leader
        )
        told = NotifyStory(is_agreed=True).read(broken, FIRST)
        return told and told.event

    assert read(BreakKind.FAILURE) == "hang"
    assert read(BreakKind.FINAL) is None, "the failure is told"
    assert read(BreakKind.FAILURE, is_hang=False) is None
    assert read(BreakKind.FAILURE, is_leader=False) is None


def test_the_environment_has_what_is_known_and_no_token() -> None:
    environ = {"MUSTER_TOKEN": "f" * 32, "TORCHX_JOB_ID": "local_cwd://torchx/a", "HOME": "/h"}
    config = parse_args(["--rdzv-id", "a", "--standalone", "main.py"], environ)
    told = Notification(event="ended", round=1, attempt=2, reason="why", text="", exit_code=0)
    env = build_env(config, told, None)
    assert {name: value for name, value in env.items() if name.startswith("MUSTER_")} == {
        "MUSTER_NOTIFY_EVENT": "ended",
        "MUSTER_NOTIFY_REASON": "why",
        "MUSTER_NOTIFY_RUN_ID": "a",
        "MUSTER_NOTIFY_APP": "local_cwd://torchx/a",
        "MUSTER_NOTIFY_ATTEMPT": "2",
        "MUSTER_NOTIFY_EXIT_CODE": "0",
        "MUSTER_NOTIFY_HOST": config.node_name,
    }
    assert env["HOME"] == "/h"


@pytest.mark.parametrize(
    ("text", "step"), [('{"round": 1, "step": 5}', 5), ('{"round": 2, "step": 5}', None), ("[]", None), ("{", None)]
)
def test_the_step_of_this_round_s_status(tmp_path: Path, text: str, step: int | None) -> None:
    (tmp_path / "status.json").write_text(text)
    assert read_step(str(tmp_path), 1) == step
