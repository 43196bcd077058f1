"""Draws pictures as rows of a terminal, with rich. Pure: the same picture, view and size give the same rows.

What does not fit is folded, cut with an ellipsis, or left out, beginning with what says least. Ranks and nodes that
differ come first.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from types import MappingProxyType
from typing import Final, Literal, TypeVar

from rich.cells import chop_cells
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from muster._shared.console.summary import count_recoveries, describe_exact, is_long
from muster._shared.contract import show_controls
from muster._shared.job_view import (
    DeviceStatus,
    JobState,
    JobStatus,
    NodeState,
    NodeStatus,
    RankState,
    RankStatus,
    describe_steps,
    format_rate,
    format_value,
)
from muster._shared.records import replace
from muster._shared.reports import format_duration, format_size
from muster.cli.top.picture import JobList, JobPicture, JobRow, find_lag, is_stale, sort_nodes, sort_ranks
from muster.cli.top.state import ScreenKind, View

T = TypeVar("T")

_KEYS_OF_JOB: Final = "↑↓ Enter log  s stacks  h waits  c checkpoint  p pause  S stop  q quit"
_KEYS_OF_ENDED: Final = "↑↓ Enter log  q quit"
_KEYS_OF_JOBS: Final = "↑↓ Enter open  q quit"
_KEYS_OF_TEXT: Final = "↑↓ PgUp PgDn  / search  n N next  f follow  Esc back  q quit"
_LEFT: Final = ("JOB", "HOST", "STATE", "PHASE", "DEVICE", "COLLECTIVE", "LAST LINE", "SLOWEST RANK", "")
"""Columns of texts."""
_GAP: Final = "  "
"""Between parts of a line of the header."""
_WIDE: Final = 110
"""Columns from which on tables have room for what says less."""
_EVENTS: Final = 4
_LONG_WAIT_S: Final = 5.0
"""A wait in a collective from which on ranks that are slow by much less are not named."""
_STATE_STYLES: Final = {"RUNNING": "green", "SUCCEEDED": "green", "FAILED": "bold red", "CANCELLED": "yellow"}


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of the terminal."""

    width: int
    height: int
    has_colours: bool = True
    has_styles: bool = True
    """Bold and reverse, which show what is selected also without colours."""
    is_unicode: bool = True


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """How the rows of a job's screen are shared."""

    header: Sequence[Text]
    foot: Sequence[Text]
    node_rows: int = 0
    """Room for nodes, without the names of the columns. 0: there is no such table."""
    rank_rows: int = 0


def draw_job(picture: JobPicture, view: View, known: set[str], size: Size) -> list[str]:
    """Return one job: its header, nodes, ranks, last events, and the keys.

    Args:
        picture: of the job.
        view: where the person is.
        known: gets the columns of ranks that have had something. They stay, else tables would move with each look.
        size: of the terminal.

    Returns:
        Length at most `size.height`, each no wider than `size.width`.
    """
    layout = _lay_out(picture, view, size)
    status = get_status(picture, view)
    tables: list[RenderableType] = []
    if status is not None and layout.node_rows:
        tables.append(_build_node_table(status, view, layout.node_rows, size, has_ended=picture.has_ended))
    if status is not None and layout.rank_rows:
        tables.append(_build_rank_table(status, view, known, layout.rank_rows, size, has_ended=picture.has_ended))
    return _fill(_print([*layout.header, *tables], size), _print(layout.foot, size), size)


def draw_jobs(jobs: JobList, view: View, size: Size) -> list[str]:
    """Return the list of all jobs."""
    if jobs.rows:
        head: RenderableType = Text(f"{len(jobs.rows)} job{'s'[: len(jobs.rows) != 1]}, the newest first", style="bold")
    else:
        head = Text("no job is known here; `torchx run` or `muster run` starts one", style="bold")
    missing = [
        row for line in jobs.unreachable for row in _fold(Text(show_controls(line), style="yellow"), size, most=3)
    ]
    foot = [*missing, *_list_foot(view, _KEYS_OF_JOBS, size)]
    room = max(1, size.height - len(foot) - 1)
    columns: dict[str, Callable[[JobRow], RenderableType]] = {
        "JOB": lambda row: row.handle,
        "STATE": lambda row: Text(row.state, style=_STATE_STYLES.get(row.state.partition(" ")[0], "")),
        "": lambda row: show_controls(row.line),
    }
    table = _build_table(columns, jobs.rows, view.selected, room - 1, title="")
    return _fill(_print([head, *([table] if jobs.rows else [])], size), _print(foot, size), size)


def draw_text(title: str, lines: Sequence[str], view: View, size: Size) -> list[str]:
    """Return a log or an answer, from line `view.top` on. Each line is a row of `fold_line`."""
    shown = lines[view.top : view.top + view.page]
    head = Text(show_controls(title), style="bold")
    where = f"{min(len(lines), view.top + 1)}-{view.top + len(shown)} of {len(lines)}"
    head.append(f"   lines {where}{', follows' if view.is_following else ''}", style="dim")
    body = []
    for line in shown:
        text = Text(show_controls(line))
        if view.needle and not view.is_typing:
            text.highlight_words([view.needle], "reverse")
        body.append(text)
    return _fill(_print([head, *body], size), _print(_list_foot(view, _KEYS_OF_TEXT, size), size), size)


def print_once(picture: JobPicture, width: int, *, has_colours: bool) -> list[str]:
    """Return the same as text for programs and papers: everything, without keys. Length: as many as there are."""
    view = View(selected=-1)
    status = get_status(picture, view)
    size = Size(width=width, height=10_000, has_colours=has_colours, has_styles=has_colours)
    parts: list[RenderableType] = list(_list_header(picture, view, size))
    for role in range(len(picture.statuses)):
        status = get_status(picture, View(role=role))
        if status is None:
            continue
        if len(picture.statuses) > 1:
            parts += ["", Text(picture.statuses[role][0], style="bold")]
        if _has_node_table(status):
            parts.append(_build_node_table(status, view, len(status.nodes), size, has_ended=picture.has_ended))
        if status.ranks:
            count = len(status.ranks)
            parts.append(_build_rank_table(status, view, set(), count, size, has_ended=picture.has_ended))
        parts += _list_events(status, len(status.events))
    return [row.rstrip() for row in _print(parts, size)]


def fold_line(line: str, width: int) -> list[str]:
    """Return a line of a text as the rows that it needs, at least one, each no wider than the screen."""
    width = max(1, width)
    line = show_controls(line.expandtabs(8))
    if line.isascii():
        return [line[at : at + width] for at in range(0, len(line), width)] or [""]
    return chop_cells(line, width) or [""]


def get_status(picture: JobPicture, view: View) -> JobStatus | None:
    """Return the status of the role that is shown. None: its agents have reported nothing."""
    return picture.statuses[view.role % len(picture.statuses)][1] if picture.statuses else None


def list_rows(picture: JobPicture, view: View, size: Size) -> list[tuple[str, int]]:
    """Return what can be selected, in the order that is shown: ("rank", global rank), or ("node", node index)."""
    status = get_status(picture, view)
    if status is None:
        return []
    layout = _lay_out(picture, view, size)
    if status.ranks:
        return [("rank", each.global_rank) for each in sort_ranks(status, layout.rank_rows)]
    return [("node", each.node_index) for each in sort_nodes(status, layout.node_rows)]


def _lay_out(picture: JobPicture, view: View, size: Size) -> _Layout:
    """Lay out the page. The order of ranks and nodes also depends on how many have room."""
    status = get_status(picture, view)
    header = [row for text in _list_header(picture, view, size) for row in _fold(text, size, most=3)]
    is_paused = status is not None and status.state is JobState.PAUSED
    keys = _KEYS_OF_JOB.replace("p pause", "p go on") if is_paused else _KEYS_OF_JOB
    foot = list(_list_foot(view, _KEYS_OF_ENDED if picture.has_ended else keys, size))
    if status is None:
        return _Layout(header=header, foot=foot)
    free = size.height - len(header) - len(foot)
    events = min(len(status.events), max(0, min(_EVENTS, free - 6)))
    free -= events
    node_rows = 0
    if _has_node_table(status):
        node_rows = max(1, min(len(status.nodes), max(2, free // 3)) if status.ranks else free - 1)
        free -= min(len(status.nodes), node_rows) + 1
    events += max(0, free - len(status.ranks) - 2)  # unused rows
    return _Layout(
        header=header,
        foot=[*_list_events(status, events), *foot],
        node_rows=node_rows,
        rank_rows=max(1, free - 1) if status.ranks else 0,
    )


def _fold(text: Text, size: Size, most: int) -> list[Text]:
    """Return a text that is wider than the screen, in this many rows at most. The last one is cut."""
    if text.cell_len <= size.width or size.height < 12:
        return [text]
    rows: list[Text] = []
    for part in text.split(_GAP):  # never split these
        if rows and rows[-1].cell_len + len(_GAP) + part.cell_len <= size.width:
            rows[-1] = Text(_GAP).join([rows[-1], part])
        else:
            rows += part.wrap(Console(width=size.width, file=StringIO()), size.width)
    for row in rows:
        row.rstrip()
    if len(rows) <= most:
        return rows
    return [*rows[: most - 1], Text(" ").join(rows[most - 1 :])]


def _list_header(picture: JobPicture, view: View, size: Size) -> Iterator[Text]:
    status = get_status(picture, view)
    state = Text(picture.state, style=_STATE_STYLES.get(picture.state.partition(" ")[0], "bold"))
    yield Text.assemble((picture.handle, "bold"), "  ", state, *_name_role(picture, view))
    if picture.error:
        yield Text(show_controls(picture.error), style="yellow")
    if picture.line:
        yield Text(show_controls(picture.line))
    if status is None:
        if picture.state == "RUNNING":
            yield Text("its workers have reported nothing yet", style="dim")
        return
    if status.reason and not any(status.reason in each.text for each in picture.reasons):
        yield Text(show_controls(status.reason), style="yellow")
    yield from _list_progress(status, bar=24 if size.width >= _WIDE else 12, is_live=not picture.has_ended)
    yield from _list_costs(status)
    wait_s = max((rank.collective_s or 0.0 for rank in status.ranks), default=0.0)
    for each in status.slow_ranks[:2]:
        if wait_s >= _LONG_WAIT_S and each.late_s < wait_s / 10:
            continue  # some ms at each step do not explain why ranks wait for seconds
        yield Text(show_controls(each.describe()), style="yellow")


def _name_role(picture: JobPicture, view: View) -> Iterator[str]:
    if len(picture.statuses) > 1:
        at = view.role % len(picture.statuses)
        yield f"  role {picture.statuses[at][0]} ({at + 1} of {len(picture.statuses)}, Tab: next)"


def _list_progress(status: JobStatus, bar: int, *, is_live: bool) -> Iterator[Text]:
    has_step = status.step is not None or status.optimizer_steps is not None
    if not has_step and status.most_steps_done is None:
        return
    text = Text()
    if status.step is not None and status.total:
        part = min(1.0, (status.step if is_live else status.steps_done) / status.total)
        text.append("━" * round(part * bar), style="green")
        text.append("─" * (bar - round(part * bar)), style="dim")
        text.append(f" {part:.0%}{_GAP}".replace("%", " %"))
    if has_step and (is_live or status.step is None):
        line = status.describe()
    else:
        done = describe_steps(status.steps_done, status.most_steps_done or 0, status.total)
        line = ", ".join([done, *(f"{name} {format_value(each)}" for name, each in status.values)])
    text.append(show_controls(line).replace(", ", _GAP))
    if is_live and status.eta_s is not None and status.still_s is None:
        text.append(f"{_GAP}ETA {format_duration(status.eta_s, 0)}")
    yield text


def _list_costs(status: JobStatus) -> Iterator[Text]:
    parts = []
    if status.goodput is not None and is_long(status):
        lost = ", ".join(
            f"{name} {format_duration(lost_s, 0)}" for name, lost_s in status.goodput.lost_s if round(lost_s)
        )
        parts.append(f"goodput {status.goodput.fraction:.0%}".replace("%", " %") + (f" (lost: {lost})" if lost else ""))
    parts += [exact] if (exact := describe_exact(status)) else []
    if status.recovery_count:
        last = status.recoveries[-1] if status.recoveries else None
        count = count_recoveries(status.recovery_count, status.resize_count)
        cost = "" if last is None or last.cost_s is None else f", cost {format_duration(last.cost_s, 0)}"
        cause = "" if last is None or last.cause == status.reason else f", the last: {last.cause}"
        parts.append(f"{count}{cause}{cost}")
    yield from (Text(show_controls(each), style="dim") for each in parts)


def _list_events(status: JobStatus, most: int) -> Iterator[Text]:
    for event in status.events[len(status.events) - min(most, len(status.events)) :]:
        clock = time.strftime("%H:%M:%S", time.localtime(event.time_s))
        yield Text(f"{clock} {show_controls(event.text)}", style="dim")


def _has_node_table(status: JobStatus) -> bool:
    differ = any(node.state is not NodeState.RUNNING for node in status.nodes)
    return len(status.nodes) > 1 or differ or (bool(status.nodes) and not status.ranks)


def _build_node_table(status: JobStatus, view: View, most: int, size: Size, *, has_ended: bool) -> Table:
    is_selected = not status.ranks
    rows = sort_nodes(status, most)
    columns: dict[str, Callable[[NodeStatus], str]] = {
        "NODE": lambda node: f"{node.node_index}",
        "HOST": lambda node: show_controls(node.host),
        "STATE": lambda node: _describe_node(node, has_ended=has_ended),
        "RANKS": _describe_ranks,
        "STEP": lambda node: _format_number(node.step),
        "CPU": lambda node: "" if node.cpu is None else f"{node.cpu:.1f}",
        "MEMORY": lambda node: "" if node.memory_bytes is None else format_size(node.memory_bytes),
        "GPU": lambda node: _format_part(node.gpu),
        "SLOWEST RANK": lambda node: _describe_slowest(node) if is_selected else "",
    }
    if all(node.gpu is None for node in rows):
        del columns["GPU"]

    def find_style(node: NodeStatus) -> str:
        is_silent = is_stale(node) and not has_ended
        return "red" if node.state is NodeState.LOST else "yellow" if is_silent else ""

    title = "SLOWEST RANK" if is_selected else ""
    if len(rows) > most:
        title = f"{title}   {_describe_cut(most, len(rows), 'nodes', size)}".lstrip()
    return _build_table(columns, rows, view.selected if is_selected else -1, most, find_style, title=title)


def _describe_cut(most: int, count: int, what: str, size: Size) -> str:
    order = f" {what}: those that differ come first" if size.width >= _WIDE else ""
    return f"({most} of {count}{order})"


def _describe_ranks(node: NodeStatus) -> str:
    if not node.ranks or node.first_rank is None:
        return ""
    return f"{node.first_rank}" + (f"-{node.first_rank + node.ranks - 1}" if node.ranks > 1 else "")


def _describe_node(node: NodeStatus, *, has_ended: bool) -> str:
    if has_ended and node.state is NodeState.RUNNING:
        return "ended"
    if node.suspicion and node.state is not NodeState.LOST:
        return f"{node.state.value}, suspected"
    return f"no news for {node.age_s:.0f} s" if is_stale(node) and node.state is NodeState.RUNNING else node.state.value


def _build_rank_table(
    status: JobStatus, view: View, known: set[str], most: int, size: Size, *, has_ended: bool
) -> Table:
    rows = sort_ranks(status, most)
    if has_ended:
        rows = [replace(rank, state=RankState.ENDED) if rank.state is RankState.RUNNING else rank for rank in rows]
    is_wide = size.width >= _WIDE
    hosts = {node.node: node.host for node in status.nodes if node.host and node.node is not None}
    names_hosts = is_wide and len(set(hosts.values())) == len(hosts)  # nodes of one machine have numbers
    names = {node.node: f"{node.node_index}" for node in status.nodes}
    names |= {node: show_controls(host) for node, host in hosts.items()} if names_hosts else {}
    columns: dict[str, Callable[[RankStatus], str]] = {
        "RANK": lambda rank: f"{rank.global_rank}",
        "NODE": lambda rank: names.get(rank.node, f"{rank.node}"),
        "STATE": lambda rank: rank.state.value,
        "STEP": lambda rank: _format_number(rank.optimizer_steps if rank.step is None else rank.step),
        "LAG": lambda rank: f"{rank.lag_steps}" if rank.lag_steps else "",
        "RATE": lambda rank: format_rate(rank.rate) if rank.rate else "",
        "PHASE": lambda rank: show_controls(rank.phase),
        "CPU": lambda rank: "" if rank.cpu is None else f"{rank.cpu:.0%}",
        "MEMORY": lambda rank: "" if rank.memory_bytes is None else format_size(rank.memory_bytes),
        "GPU": lambda rank: _format_part(rank.gpu),
        "DEVICE": lambda rank: _describe_device(rank.device, is_wide=is_wide),
        "COLLECTIVE": _describe_collective,
        "LAST LINE": lambda rank: show_controls(rank.last_line),
    }
    has_room = {
        "NODE": len(status.nodes) > 1 or is_wide,
        "STATE": any(rank.state is not RankState.RUNNING for rank in rows),
        "LAG": not has_ended,
        "RATE": is_wide,
        "COLLECTIVE": not has_ended,
    }
    known.update(name for name, show in columns.items() if any(map(show, rows)))
    shown = {name: show for name, show in columns.items() if has_room.get(name, True) and name in known}
    shown["LAST LINE"] = columns["LAST LINE"]
    slow = {each.global_rank for each in status.slow_ranks}

    def find_style(rank: RankStatus) -> str:
        is_behind = rank.global_rank in slow or find_lag(rank) > 0
        return "red" if rank.state is RankState.FAILED else "yellow" if is_behind and not has_ended else ""

    title = "LAST LINE"
    if len(rows) > most:
        cut = _describe_cut(most, len(rows), "ranks", size)
        title = f"{title}   {cut}" if is_wide else cut
    widths = {} if is_wide else {"COLLECTIVE": 26, "DEVICE": 16}
    return _build_table(shown, rows, view.selected, most, find_style, title=title, widths=widths)


def _describe_device(device: DeviceStatus | None, *, is_wide: bool) -> str:
    """Say what is wrong with a rank's GPU, and if there is room how it is.

    As in `Xid 79, 71 C, 642 W, power cap`.
    """
    if device is None:
        return ""
    parts = (
        "lost" if device.is_lost else "",
        "" if device.last_xid is None else f"Xid {device.last_xid}",
        f"{device.ecc_uncorrected} memory errors" if device.ecc_uncorrected else "",
        f"{device.temperature_c} C" if is_wide and device.temperature_c is not None else "",
        f"{device.power_w} W" if is_wide and device.power_w is not None else "",
        show_controls(device.slowed_by),
    )
    return ", ".join(part for part in parts if part)


def describe_rank(rank: RankStatus) -> str:
    """Say how far a rank is and what it does, for a person who looks for the one that keeps others waiting."""
    step = rank.optimizer_steps if rank.step is None else rank.step
    parts = (
        "" if step is None else f"step {step}",
        f"{rank.lag_steps} behind" if rank.lag_steps else "",
        rank.phase,
        _describe_collective(rank),
        rank.last_line,
    )
    return show_controls(", ".join(filter(None, parts)))


def _describe_slowest(node: NodeStatus) -> str:
    return "" if node.slowest is None else f"rank {node.slowest.global_rank}: {describe_rank(node.slowest)}"


def _describe_collective(rank: RankStatus) -> str:
    if not rank.collective:
        return ""
    age = f" {rank.collective_s:.0f} s" if rank.collective_s is not None and rank.collective_s >= 1 else ""
    return show_controls(rank.collective.removesuffix(" of default_pg") + age)


def _format_number(number: int | None) -> str:
    return "" if number is None else f"{number}"


def _format_part(part: float | None) -> str:
    return "" if part is None else f"{part:.0%}"


def _list_foot(view: View, keys: str, size: Size) -> Iterator[Text]:
    """Return the last rows: a question or an answer, if there is one, and always the keys."""
    if view.is_typing:
        yield Text(f"/{view.needle}", style="bold")
    elif view.asks_stop:
        yield Text("stop the job? All ranks save and stop at one step.  y yes  n no", style="bold red")
    elif view.note:
        yield from _fold(Text(show_controls(view.note), style="bold"), size, most=3)
    back = "  Esc list" if view.has_list and view.screen is ScreenKind.JOB else ""
    yield Text(f"{keys}{back}", style="dim")


def _fill(rows: Sequence[str], foot: Sequence[str], size: Size) -> list[str]:
    """Return a whole screen: the rows that have room, and the foot at the bottom."""
    foot = foot[-size.height :]
    room = size.height - len(foot)
    return [*rows[:room], *[""] * (room - len(rows)), *foot]


def _build_table(
    columns: Mapping[str, Callable[[T], RenderableType]],
    rows: Sequence[T],
    selected: int,
    most: int,
    find_style: Callable[[T], str] = lambda _: "",
    *,
    title: str,
    widths: Mapping[str, int] = MappingProxyType({}),
) -> Table:
    """Build a table of the rows around the selected one.

    Args:
        columns: what each shows of a row. The last one has the rest of the width.
        rows: all of them.
        selected: the place of one. -1: none is.
        most: how many have room.
        find_style: finds the colour of a row.
        title: of the last column.
        widths: what columns have at most.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim", expand=True)
    *_, last = columns
    for name in columns:
        justify: Literal["left", "right"] = "left" if name in _LEFT else "right"
        ratio, head = (1, title) if name == last else (None, name)
        table.add_column(head, justify=justify, ratio=ratio, max_width=widths.get(name), no_wrap=True)
    start = max(0, min(selected - most // 2, len(rows) - most))  # the selected row is in the middle
    for at, row in enumerate(rows[start : start + most], start):
        cells = (show(row) for show in columns.values())
        table.add_row(*cells, style="reverse" if at == selected else find_style(row))
    return table


def _print(parts: Iterable[RenderableType], size: Size) -> list[str]:
    """Return the rows with colours, each cut to the width."""
    console = Console(
        file=StringIO(),
        width=size.width,
        height=size.height,
        force_terminal=size.has_styles,
        color_system="standard" if size.has_styles else None,
        no_color=not size.has_colours,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=False,
    )
    rows: list[str] = []
    for part in parts:
        with console.capture() as captured:
            console.print(part, no_wrap=True, overflow="ellipsis", crop=True)
        rows += captured.get().rstrip("\n").split("\n")
    return rows if size.is_unicode else [row.translate(_ASCII) for row in rows]


_ASCII: Final = str.maketrans({"━": "#", "─": "-", "…": "~", "↑": "^", "↓": "v"})
