"""Colours of prefixes: on a terminal only, one per rank, and not where the user refuses them."""

import os
import pty

import pytest

from muster.agent.cli.arguments import parse_args
from muster.agent.config import LogConfig, Std
from muster.agent.logs.console import Console
from muster.agent.logs.routing import INHERITED, route_stream


def write(fds: tuple[int, int], *, has_colour: bool) -> bytes:
    """What two workers' lines are on the reader's side."""
    reader, writer = fds
    console = Console(stdout_fd=writer, stderr_fd=writer, has_colour=has_colour)
    for rank in (0, 1):
        feed = console.open_feed(Std.OUT, b"[w%d]:" % rank, rank)
        feed.offer(b"hello\n")
        feed.end()
    assert console.close()
    os.close(writer)
    chunks = []
    try:
        while chunk := os.read(reader, 4096):
            chunks.append(chunk)
    except OSError:  # how a terminal reports the end
        pass
    os.close(reader)
    return b"".join(chunks).replace(b"\r\n", b"\n")


def test_each_rank_has_its_colour_on_a_terminal() -> None:
    text = write(pty.openpty(), has_colour=True)
    assert b"\x1b[36m[w0]:\x1b[0mhello\n" in text
    assert b"\x1b[33m[w1]:\x1b[0mhello\n" in text


def test_no_colour_where_it_is_refused_or_there_is_no_terminal() -> None:
    assert b"\x1b[3" not in write(pty.openpty(), has_colour=False)
    assert write(os.pipe(), has_colour=True) == b"[w0]:hello\n[w1]:hello\n"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_what_refuses_colours(environ: dict[str, str], expected: bool) -> None:
    assert parse_args(["main.py"], environ).logs.has_colour is expected


@pytest.mark.parametrize(
    ("flags", "is_terminal", "expected"),
    [
        ("--nproc-per-node 2", True, True),
        ("--nproc-per-node 2", False, False),
        ("--nproc-per-node 1", True, False),  # a worker alone has the terminal for itself
        ("--nproc-per-node 2 --redirects 0", True, False),
        ("--nproc-per-node 2 --tee 1", True, False),
    ],
)
def test_several_workers_on_a_terminal_get_prefixes(monkeypatch, flags, is_terminal, expected) -> None:
    monkeypatch.setattr(os, "isatty", lambda _fd: is_terminal)
    config = parse_args([*flags.split(), "main.py"], {}).logs
    assert config.shows_prefixed is expected


def test_prefixed_streams_need_no_files() -> None:
    route = route_stream(LogConfig(base_dir=None, shows_prefixed=True), Std.OUT, 0, "/logs/attempt_0")
    assert (route.captured, route.to_console, route.path) == (True, True, None)
    assert route_stream(LogConfig(base_dir=None), Std.OUT, 0, "/logs/attempt_0") == INHERITED
