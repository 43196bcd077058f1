"""Follows a running job of this machine: its processes by its records, and the steps of its ranks by their page.

Records are written once a second, but a fault must happen at a step. So the steps are read where the agent reads them,
in the status page, which belongs to the same user (`StatusPageLayout`).
"""

import contextlib
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from muster._shared.contract import LogNames
from muster._shared.foreign_files import read_regular
from muster._shared.goodput import CHECKPOINT_PHASES
from muster._shared.job_view import limit_steps
from muster._shared.layouts import StatusPageLayout as Layout
from muster._shared.layouts import read_phase, read_values
from muster.cli.history.sources import Event, parse_files
from muster.cli.rehearse.faults import NotPossibleError

_PAGE: Final = "/memfd:muster-status-page"
_SEARCH_S: Final = 0.1
_EVENTS_LIMIT_BYTES: Final = 16 << 20
"""For one look."""


@dataclass(kw_only=True)
class _Agent:
    node: int = 0
    pid: int = 0
    offset: int = 0
    """Global rank of its first worker."""
    workers: dict[int, int] = field(default_factory=dict)
    """Process by global rank."""
    page: "mmap.mmap | None" = None
    """The page of its newest round. None: it has none."""
    search_s: float = 0.0
    """When it is looked for next: records may be late, or lost on a full disk."""
    over: int = 0
    """This round, and those before it, have ended."""
    runs: bool = False


@dataclass(frozen=True, kw_only=True)
class Slot:
    """What a rank has reported."""

    done: int = 0
    """The steps that it has done. If its script reports none, they are those of its optimizer in this attempt."""
    start: int = 0
    """Steps that were done when this attempt did its first one: it may have done several when it is seen first."""
    is_counted: bool = False
    """The script counts them, across attempts."""
    is_saving: bool = False
    """It says so, by the name of its phase."""
    has_saved: bool = False
    """It has reported a checkpoint."""
    asks: bool = False
    """It asks whether it must stop."""


class Watch:
    """The watch of one app. Call `look` again and again."""

    def __init__(self, log_dir: Path) -> None:
        """Watch an app.

        Args:
            log_dir: of its role. The agents' records are in a folder of it.
        """
        self._log_dir = log_dir
        self._read_bytes: dict[Path, int] = {}
        self._agents: dict[str, _Agent] = {}
        self.has_checkpoint = False
        """The agents know of a checkpoint that all ranks have reported."""

    def look(self) -> dict[int, Slot]:
        """Read what each global rank has reported in the round that runs, or has just ended. Then read new records."""
        found: dict[int, Slot] = {}
        for agent in self._agents.values():
            if agent.page is not None:
                slots = range(len(agent.page) // Layout.BLOCK_BYTES - 1)
                found |= {agent.offset + each: _read_slot(agent.page, each) for each in slots}
        for event in self._read_events():
            self.has_checkpoint = self.has_checkpoint or event.what == "checkpoint_completed"
            follow(self._agents, event)
        for agent in self._agents.values():
            if not _is_alive(agent.pid):
                _forget(agent)  # it recorded no end
            elif time.monotonic() >= agent.search_s:
                agent.search_s = time.monotonic() + _SEARCH_S
                _search_page(agent)
        return found

    def read_values(self) -> tuple[int, dict[str, float]]:
        """Read how many steps global rank 0 has done, and the numbers that it has reported last, by name.

        They are empty if it has none, or does not run.
        """
        for agent in self._agents.values():
            if agent.page is not None and agent.offset == 0:
                return _read_slot(agent.page, 0).done, read_values(agent.page, 0)
        return 0, {}

    @property
    def runs(self) -> bool:
        """All agents that run have all their workers."""
        return any(each.runs for each in self._agents.values()) and all(
            each.runs for each in self._agents.values() if _is_alive(each.pid)
        )

    def has_ended(self, rank: int) -> bool:
        """Return whether the worker of a global rank was started in the round that runs, and has ended."""
        pids = [agent.workers[rank] for agent in self._agents.values() if rank in agent.workers]
        return bool(pids) and not any(map(_is_alive, pids))

    def find_worker(self, rank: int) -> int:
        """See `Scene`."""
        return _find_alive((each.workers.get(rank, 0) for each in self._agents.values()), f"rank {rank}")

    def find_agent(self, node: int) -> int:
        """See `Scene`."""
        return _find_alive((each.pid for each in self._agents.values() if each.node == node), f"node {node}")

    def close(self) -> None:
        """Close the pages."""
        for agent in self._agents.values():
            _forget(agent)

    def _read_events(self) -> Iterator[Event]:
        for path in self._log_dir.glob(f"*/{LogNames.EVENTS}"):
            with contextlib.suppress(OSError):
                begin = self._read_bytes.get(path, 0)
                lines = read_regular(path, _EVENTS_LIMIT_BYTES, begin)
                whole = lines[: lines.rfind(b"\n") + 1]
                self._read_bytes[path] = begin + len(whole)
                yield from parse_files(iter([(str(path), whole)]))


def follow(agents: dict[str, _Agent], event: Event) -> None:
    """Take in a record: which processes run.

    Args:
        agents: by their names.
        event: the next record of one of them.
    """
    agent = agents.setdefault(event.agent, _Agent())
    agent.node = agent.node if event.node_index is None else event.node_index
    detail = event.detail
    if event.what == "agent_started":
        agent.pid = detail.get("pid", 0)
    elif event.what == "round_formed":
        _forget(agent)
        agent.over = event.round - 1
        agent.offset, agent.search_s = detail.get("rank_offset", 0), 0.0
    elif event.what == "worker_released":
        agent.workers[agent.offset + detail.get("local_rank", 0)] = detail.get("pid", 0)
    elif event.what == "workers_started":
        agent.runs = True
    elif event.what in ("workers_stopped", "agent_ended", "job_ended"):
        _forget(agent)
        agent.over = event.round


def find_processes(events: Iterable[Event], node: int) -> tuple[int, dict[int, int]]:
    """Find the newest agent's process of a node, and those of its workers by global rank. 0: there is none."""
    agents: dict[str, _Agent] = {}
    for event in events:
        follow(agents, event)
    found = [each for each in agents.values() if each.node == node]
    return (found[-1].pid, found[-1].workers) if found else (0, {})


def _forget(agent: _Agent) -> None:
    if agent.page is not None:
        agent.page.close()
    agent.page, agent.runs = None, False
    agent.workers.clear()


def _is_alive(pid: int) -> bool:
    return pid > 0 and os.path.exists(f"/proc/{pid}/exe")  # a zombie has none


def _find_alive(pids: Iterable[int], what: str) -> int:
    if (pid := next(filter(_is_alive, pids), 0)) == 0:
        raise NotPossibleError(f"{what} did not run")
    return pid


def _search_page(agent: _Agent) -> None:
    """Keep the page of the agent's newest round, and close an older one."""
    newest = agent.page
    folder = f"/proc/{agent.pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError, ValueError):
                if not os.readlink(f"{folder}/{name}").startswith(_PAGE):
                    continue
                with open(f"{folder}/{name}", "rb") as file:
                    page = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                older = page
                if _read_word(page, Layout.ROUND) > (
                    agent.over if newest is None else _read_word(newest, Layout.ROUND)
                ):
                    newest, older = page, newest
                if older is not None:
                    older.close()
    agent.page = newest


def _read_slot(page: mmap.mmap, local_rank: int) -> Slot:
    first = (local_rank + 1) * Layout.WORDS
    step = limit_steps(_read_word(page, first + Layout.STEP), _read_word(page, first + Layout.TOTAL))
    phase = read_phase(page, local_rank, _read_word(page, first + Layout.PHASE))
    done = step or _read_word(page, first + Layout.OPTIMIZER_STEPS)
    return Slot(
        done=done,
        start=max(0, min(_read_word(page, first + Layout.FIRST), done) - 1),
        is_counted=step > 0,
        is_saving=phase in CHECKPOINT_PHASES,
        has_saved=_read_word(page, first + Layout.SAVED) > 0,
        asks=_read_word(page, first + Layout.ASKED + Layout.STOP) != 0,
    )


def _read_word(page: mmap.mmap, word: int) -> int:
    return int.from_bytes(page[word * 8 : word * 8 + 8], "little", signed=True)
