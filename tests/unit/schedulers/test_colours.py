"""Colours of `torchx run` and `torchx log`: on a terminal only, and only for TorchX's command line."""

import sys

import pytest

from muster.agent.logs.lines import build_prefix
from muster.agent.round import Round
from muster.schedulers.runner import colours
from muster.schedulers.runner.colours import colour_for_people

ROUND = Round(
    number=1,
    attempt=0,
    restarts_left=0,
    group_rank=1,
    group_world_size=2,
    rank_offset=2,
    world_size=4,
    role_rank_offset=2,
    role_world_size=4,
    master_addr="a",
    master_port=1,
)
NODE = build_prefix(role="main", local_rank=1, round=ROUND).decode()
ALONE = "[main1]:"
LINES = [f"{NODE}step 1\n", f"{ALONE}step 1\n", "[muster] a line\n", "JOB FAILED  job: why\n", "[x] y\n", "plain\n"]


def test_programs_and_pipes_get_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(colour_for_people(LINES, {"TERM": "xterm"})) == LINES
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert list(colour_for_people(LINES, {"TERM": "xterm"})) == LINES, "it is not TorchX's command line"


def test_people_get_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colours, "_prints_to_terminal", lambda: True)
    assert list(colour_for_people(iter(LINES), {"TERM": "xterm"})) == [
        f"\x1b[32m{NODE}\x1b[0mstep 1\n",  # global rank 3
        f"\x1b[33m{ALONE}\x1b[0mstep 1\n",
        "[muster] a line\n",
        "\x1b[1;31mJOB FAILED  job: why\x1b[0m\n",
        "[x] y\n",
        "plain\n",
    ]


@pytest.mark.parametrize("environ", [{"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}, {}])
def test_colours_can_be_refused(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    monkeypatch.setattr(colours, "_prints_to_terminal", lambda: True)
    assert list(colour_for_people(LINES, environ)) == LINES
