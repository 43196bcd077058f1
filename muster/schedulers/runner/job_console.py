"""Prints the lines of all replicas of a job on one terminal: alike lines once, and live rows below them.

Live rows are progress bars, and one that says how the job is doing.

An agent whose reader is a terminal (`Env.LIVE_BARS`) writes the state of each bar once a second, as a line that begins
with a carriage return. When the bar has ended, it writes such a line without text.
"""

import atexit
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TextIO

from muster._shared.console.alike_lines import AlikeLines, HeldUnit, format_ranks
from muster._shared.console.progress_bars import ProgressBars

PREFIX: Final = re.compile(
    r"\[[^\[\]|]*?(?P<local>\d+(?:[,-]\d+)*)(?:\|n(?P<node>\d+(?:[,-]\d+)*)\.r(?P<rank>\d+(?:[,-]\d+)*))?\]:"
)
"""`[main0]:` or `[main0|n1.r2]:`, or `[main0-3|n1.r4-7]:` of several ranks. Source: build_prefix in
`muster/agent/logs/lines.py`."""

_HEADLINE: Final = "JOB FAILED "
# By a rank's last digit.
_RANK_COLOURS: Final = ("36", "33", "35", "32", "34", "96", "93", "95", "92", "94")
"""As the agent's on a terminal."""
_MARK: Final = "\r"
_CLOSE_LIMIT_S: Final = 1.0
_LOOK_S: Final = 1.0
_LOOK_SHARE: Final = 0.05
"""The share of the time that looks at how the job is doing may take."""


def allows_colours(environ: Mapping[str, str]) -> bool:
    """Return whether the user has not refused colours, on a terminal that may have any.

    Source: https://no-color.org.
    """
    return not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"


def paint_line(line: str) -> str:
    """Colour a line: its prefix in its rank's colour, the headline of a failed job in red."""
    found = PREFIX.match(line)
    if found is not None:
        first = (found["rank"] or found["local"]).replace(",", "-").partition("-")[0]
        colour = _RANK_COLOURS[int(first[-1])]
        return f"\x1b[{colour}m{found[0]}\x1b[0m{line[found.end() :]}"
    return f"\x1b[1;31m{line.rstrip()}\x1b[0m\n" if line.startswith(_HEADLINE) else line


class _Speaker:
    """The lines with one prefix, of one replica."""

    def __init__(self, *, role: str, index: int, found: "re.Match[str]", peers: int) -> None:
        self.stream = role
        self.launch = None
        self.peers = peers
        self.index = index
        self.prefix = found[0]
        self.head = found.string[found.start() : found.start("local")]
        self.local = parse_ranks(found["local"])
        self.nodes = parse_ranks(found["node"] or "")
        self.ranks = parse_ranks(found["rank"]) if found["rank"] else self.local


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse `0-2,5` as numbers."""
    spans = (part.partition("-") for part in text.split(",") if part)
    return tuple(rank for first, _, last in spans for rank in range(int(first), int(last or first) + 1))


def _join_prefixes(speakers: "list[_Speaker]") -> tuple[str, str]:
    """Return the replicas and prefix of what several have said: "0-1" and "[main0-3|n0-1.r0-7]:"."""
    local = format_ranks({rank for each in speakers for rank in each.local})
    nodes = format_ranks({node for each in speakers for node in each.nodes}) if speakers[0].nodes else ""
    ranks = format_ranks({rank for each in speakers for rank in each.ranks})
    node = f"|n{nodes}.r{ranks}" if nodes else ""
    return format_ranks({each.index for each in speakers}), f"{speakers[0].head}{local}{node}]:"


class JobConsole:
    """The lines of all replicas that one process prints to a terminal, and the live rows below. Any thread may use it.

    What is held is printed when a replica's lines end, and when the process does.
    """

    def __init__(self, file: TextIO, environ: Mapping[str, str] = os.environ) -> None:
        """Print nothing yet.

        Args:
            file: the terminal.
            environ: this process's environment.
        """
        self._file = file
        self._has_colours = allows_colours(environ)
        self._changed = threading.Condition()
        self._alike: dict[str, AlikeLines[_Speaker]] = {}
        """By role."""
        self._rows: dict[tuple[str, int, int, str], bytes] = {}
        self._bars = ProgressBars(lambda: measure(file)) if environ.get("TERM", "dumb") != "dumb" else None
        self._is_closed = False
        self._open = 0
        """Replicas whose lines are being printed."""
        self._status = b""
        self._watcher: threading.Thread | None = None
        self._timer: threading.Thread | None = None
        self._is_idle = False
        """The timer waits until something is held."""

    def print_lines(self, lines: Iterable[str], role: str, index: int, merged_ranks: int = 0) -> None:
        """Print all lines of one replica, each with its `ROLE/REPLICA`.

        Args:
            lines: with their newlines, until the replica has ended.
            role: the replica's role.
            index: its number.
            merged_ranks: see `agent_command.count_merged_ranks`.
        """
        with self._changed:
            self._open += 1
            alike = self._alike.setdefault(role, AlikeLines(merges_lines=merged_ranks > 0))
        speakers: dict[str, _Speaker] = {}
        try:
            for line in lines:
                bar = parse_bar(line)
                if bar is not None:
                    self._set_row((role, index, *bar[0]), f"{role}/{index} {line[1:-1]}" if bar[1] else "")
                    continue
                is_whole = line.startswith(f"[{role}") and line.endswith("\n")
                found = PREFIX.match(line) if is_whole else None
                if found is not None and found[0] not in speakers:
                    speakers[found[0]] = _Speaker(role=role, index=index, found=found, peers=merged_ranks)
                with self._changed:
                    if found is None:
                        shown = [*map(self._format, alike.take_all()), self._format_line(role, str(index), line)]
                    else:
                        text = line[found.end() :].encode("utf-8", "surrogatepass")
                        shown = [*map(self._format, alike.push(speakers[found[0]], text, time.monotonic()))]
                    self._print("".join(shown))
                    self._watch(alike)
        finally:
            with self._changed:
                self._open -= 1
                self._status = self._status if self._open else b""
                for key in [key for key in self._rows if key[:2] == (role, index)]:
                    del self._rows[key]
                self._print("".join(map(self._format, alike.take_all())), redraws=True)

    def follow_status(self, read: Callable[[], str]) -> None:
        """Say in the last row how the job is doing, as long as lines are printed. Only the first call counts.

        Args:
            read: returns the row, "" for none. It may take its time, because a thread calls it.
        """
        with self._changed:
            if self._watcher is None and self._bars is not None:
                self._watcher = threading.Thread(
                    target=self._watch_status, args=(read,), name="muster-job-status", daemon=True
                )
                self._watcher.start()

    def _watch_status(self, read: Callable[[], str]) -> None:
        has_begun = False
        while not (self._is_closed or (has_begun and not self._open)):
            began_s = time.monotonic()
            text = read()
            took_s = time.monotonic() - began_s
            with self._changed:
                has_begun = has_begun or self._open > 0
                status = f"[muster] {text}".encode() if text and self._open else b""
                if status != self._status:
                    self._status = status
                    self._print("", redraws=True)
            time.sleep(max(_LOOK_S, took_s / _LOOK_SHARE))

    def close(self) -> None:
        """Erase the rows and draw no more: other lines follow. Does not wait long for a terminal that is stopped."""
        self._is_closed = True
        if self._changed.acquire(timeout=_CLOSE_LIMIT_S):
            self._rows.clear()
            self._print_held(redraws=True)
            self._changed.release()

    # -- with the lock held -----------------------------------------------------------------------------------------

    def _set_row(self, key: tuple[str, int, int, str], text: str) -> None:
        with self._changed:
            if text:
                self._rows[key] = text.encode()
            else:
                self._rows.pop(key, None)
            self._print("", redraws=True)

    def _format(self, said: "HeldUnit[_Speaker]") -> str:
        first = said.speakers[0]
        indices, prefix = (str(first.index), first.prefix) if len(said.speakers) == 1 else _join_prefixes(said.speakers)
        rows = said.text.decode("utf-8", "surrogatepass")[:-1].split("\n")
        return "".join(self._format_line(first.stream, indices, f"{prefix}{row}\n") for row in rows)

    def _format_line(self, role: str, indices: str, line: str) -> str:
        if not self._has_colours:
            return f"{role}/{indices} {line}"
        return f"\x1b[32m{role}/{indices}\x1b[0m {paint_line(line)}"

    def _print(self, text: str, *, redraws: bool = False) -> None:
        """Print text above the rows."""
        if not text and not redraws:
            return
        parts = [text]
        if self._bars is not None:
            parts.insert(0, self._bars.erase().decode())
            if (self._rows or self._status) and not self._is_closed and text[-1:] in ("", "\n"):
                parts.append(self._bars.draw([self._rows[key] for key in sorted(self._rows)], self._status).decode())
        data = "".join(parts)
        if data:
            self._file.write(data)
            self._file.flush()

    def _print_held(self, *, redraws: bool = False) -> None:
        held = [said for alike in self._alike.values() for said in alike.take_all()]
        self._print("".join(map(self._format, held)), redraws=redraws)

    # -- what is held long enough -----------------------------------------------------------------------------------

    def _watch(self, alike: "AlikeLines[_Speaker]") -> None:
        """See to it that what is held is printed in time."""
        if alike.due_s is None:
            return
        if self._timer is not None and not self._is_idle:
            return
        self._is_idle = False
        if self._timer is None:
            atexit.register(self._print_at_exit)
            self._timer = threading.Thread(target=self._print_in_time, name="muster-job-console", daemon=True)
            self._timer.start()
        self._changed.notify()

    def _print_in_time(self) -> None:
        with self._changed:
            while True:
                now_s = time.monotonic()
                due = [said for alike in self._alike.values() for said in alike.take_due(now_s)]
                self._print("".join(map(self._format, due)))
                times = [alike.due_s for alike in self._alike.values() if alike.due_s is not None]
                self._is_idle = not times
                self._changed.wait(max(0.0, min(times) - now_s) if times else None)

    def _print_at_exit(self) -> None:
        if self._changed.acquire(timeout=_CLOSE_LIMIT_S):
            self._print_held()
            self._changed.release()


def measure(file: TextIO) -> os.terminal_size:
    """Return the columns and lines. For a terminal that reports none they are 80 by 24."""
    try:
        size = os.get_terminal_size(file.fileno())
    except OSError:
        size = os.terminal_size((0, 0))
    return os.terminal_size((size.columns or 80, size.lines or 24))


def parse_bar(line: str) -> "tuple[tuple[int, str], str] | None":
    """Return the rank (as a number, and the whole prefix) and the state of a bar. None: the line is another."""
    if not line.startswith(_MARK) or not line.endswith("\n"):
        return None
    found = PREFIX.match(line, 1)
    if found is None:
        return None
    return (parse_ranks(found["rank"] or found["local"])[0], found[0]), line[found.end() :].strip()


def unmark_bars(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines for a program: bars as plain ones."""
    for line in lines:
        bar = parse_bar(line) if line.startswith(_MARK) else None
        if bar is None:
            yield line
        elif bar[1]:
            yield line[1:]
