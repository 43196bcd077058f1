"""What the view shows and which key does what. Pure: `press(view, key)` returns the next view and what is to be done.

| where        | keys                                                                                         |
|---           |---                                                                                           |
| all jobs     | up, down, Enter opens one, q                                                                 |
| one job      | up, down, Enter shows a rank's log, Tab the next role, s, h, c, p, S, Escape, q              |
| a text       | up, down, Page Up, Page Down, Home, End, / searches, n and N, f follows, Escape, q           |
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, TypeAlias

from muster.cli.top.keys import BACKSPACE, ENTER, ESCAPE


class ScreenKind(Enum):
    """What fills the screen."""

    JOBS = "jobs"
    JOB = "job"
    TEXT = "text"


class KeyAction(Enum):
    """What a key asks for."""

    OPEN_JOB = "open"
    OPEN_LOG = "log"
    STACKS = "stacks"
    WAITS = "waits"
    CHECKPOINT = "checkpoint"
    PAUSE = "pause"
    STOP = "stop"
    BACK = "back"
    QUIT = "quit"


@dataclass(frozen=True, kw_only=True)
class View:
    """Where the person is."""

    screen: ScreenKind = ScreenKind.JOB
    has_list: bool = False
    """Escape leads from a job to the list of jobs."""
    selected: int = 0
    """Row of the list on the screen, from 0."""
    rows: int = 0
    """How many rows that list has."""
    role: int = 0
    """Which of the job's roles it is."""
    roles: int = 1
    top: int = 0
    """First line of a text that is shown."""
    lines: int = 0
    """How many lines the text has."""
    page: int = 20
    """How many of them have room."""
    is_following: bool = True
    """The end of the text is shown, and stays so."""
    needle: str = ""
    """What is searched for in a text."""
    is_typing: bool = False
    """The needle is being typed."""
    asks_stop: bool = False
    """"S" was pressed. y stops the job."""
    note: str = ""
    """One line: what became of a request."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """Find the needle from this line on."""

    line: int
    is_backward: bool = False


KeyResult: TypeAlias = KeyAction | Search | None

_STEPS: Final = {"up": -1, "k": -1, "down": 1, "j": 1}
_ASKED: Final = {
    "s": KeyAction.STACKS,
    "h": KeyAction.WAITS,
    "c": KeyAction.CHECKPOINT,
    "p": KeyAction.PAUSE,
    ENTER: KeyAction.OPEN_LOG,
}


def press(view: View, key: str) -> tuple[View, KeyResult]:
    """Decide what a key does.

    Args:
        view: before.
        key: see `keys.KeyParser`.

    Returns:
        The view after it, and what is to be done.
    """
    if view.is_typing:
        return _type(view, key)
    if view.asks_stop:
        return replace(view, asks_stop=False, note="" if key == "y" else "not stopped"), (
            KeyAction.STOP if key == "y" else None
        )
    if key == "q":
        return view, KeyAction.QUIT
    if key == ESCAPE:
        return replace(view, note=""), KeyAction.BACK
    return _press_in_text(view, key) if view.screen is ScreenKind.TEXT else _press_in_list(view, key)


def _move(key: str, at: int, end: int, page: int) -> int | None:
    """Return where a key leads from here. None: it is no key that moves."""
    if key in _STEPS:
        return min(end, max(0, at + _STEPS[key]))
    pages = {"page up": at - page, "page down": at + page, " ": at + page, "home": 0, "g": 0, "end": end, "G": end}
    return min(end, max(0, pages[key])) if key in pages else None


def _press_in_list(view: View, key: str) -> tuple[View, KeyResult]:
    selected = _move(key, view.selected, max(0, view.rows - 1), view.page)
    if selected is not None:
        return replace(view, selected=selected), None
    if view.screen is ScreenKind.JOBS:
        return view, KeyAction.OPEN_JOB if key == ENTER and view.rows else None
    if key == "\t" and view.roles > 1:
        return replace(view, role=(view.role + 1) % view.roles, selected=0), None
    if key == "S":
        return replace(view, asks_stop=True, note=""), None
    return view, _ASKED.get(key)


def _press_in_text(view: View, key: str) -> tuple[View, KeyResult]:
    top = _move(key, view.top, max(0, view.lines - view.page), view.page)
    if top is not None:
        return replace(view, top=top, is_following=key in ("end", "G")), None
    if key == "f":
        return replace(view, is_following=not view.is_following), None
    if key == "/":
        return replace(view, is_typing=True, needle="", note=""), None
    if key in ("n", "N") and view.needle:
        step = -1 if key == "N" else 1
        return replace(view, is_following=False), Search(line=view.top + step, is_backward=key == "N")
    return view, None


def _type(view: View, key: str) -> tuple[View, KeyResult]:
    if key == ESCAPE:
        return replace(view, is_typing=False, needle=""), None
    if key == ENTER:
        if not view.needle:
            return replace(view, is_typing=False), None
        return replace(view, is_typing=False, is_following=False), Search(line=view.top)
    if key == BACKSPACE:
        return replace(view, needle=view.needle[:-1]), None
    return (replace(view, needle=view.needle + key), None) if len(key) == 1 else (view, None)


def found(view: View, line: int | None) -> View:
    """Return the view after a search: the line that was found on top. None: there is none."""
    if line is None:
        return replace(view, note=f"{view.needle!r} is not there")
    return replace(view, top=line, note="")


def fit(view: View, **found: Any) -> View:
    """Return the view over what is there now.

    Args:
        view: before.
        found: the rows of the list, the lines of the text, or how many have room (`page`).
    """
    view = replace(view, **found)
    page = max(1, view.page)
    end = max(0, view.lines - page)
    top = end if view.is_following else min(view.top, end)
    return replace(view, page=page, selected=min(view.selected, max(0, view.rows - 1)), top=top)
