"""Records of agents of which the truth is known: each agent has a clock of its own, and time is that of the job."""

import json
from dataclasses import dataclass, field
from typing import Any

from muster._shared.contract import FORMAT

START_S = 1_800_000_000.0


@dataclass
class Agent:
    """Writes records as an agent does, by its own clock."""

    index: int
    name: str
    clock_s: float
    """Its monotonic clock at the job's start."""
    wall_error_s: float = 0.0
    lines: list[dict[str, Any]] = field(default_factory=list)
    round: int = 0
    attempt: int = 0

    def write(self, at_s: float, what: str, ranks: tuple[int, ...] = (), **detail: Any) -> None:
        """`at_s`: since the job's start."""
        self.lines.append(
            {
                "format": FORMAT,
                "agent": self.name,
                "time_s": START_S + at_s + self.wall_error_s,
                "monotonic_s": self.clock_s + at_s,
                "node": self.index if self.round else None,
                "node_index": self.index if self.round else None,
                "round": self.round,
                "attempt": self.attempt,
                "what": what,
                "ranks": list(ranks),
                "duration_s": None,
                "detail": detail,
            }
        )

    def compare(self, at_s: float, leader: "Agent", error_s: float = 0.0005) -> None:
        """As by heartbeats: the leader's CLOCK_BOOTTIME is its monotonic clock and 1000 s."""
        ahead_s = leader.clock_s + 1000.0 - self.clock_s + (error_s / 2 if leader is not self else 0.0)
        self.write(
            at_s,
            "clock_compared",
            member=self.name,
            leader=leader.name,
            ahead_s=ahead_s,
            uncertainty_s=error_s if leader is not self else 0.0,
        )

    def print_lines(self) -> bytes:
        return b"".join(json.dumps(line).encode() + b"\n" for line in self.lines)


class Job:
    """`count` nodes of two ranks, of which node 0 leads."""

    def __init__(self, count: int = 2, nproc: int = 2, step_s: float = 0.5) -> None:
        self.agents = [
            Agent(index=index, name=f"a{index}", clock_s=1e5 * (index + 1), wall_error_s=37.0 * index)
            for index in range(count)
        ]
        self.nproc, self.step_s = nproc, step_s
        self.at_s = 0.0
        self.done = 0
        self.number = 0
        for agent in self.agents:
            agent.write(0.0, "agent_started", pid=1, start="warm", host=f"host-{agent.index}", node_index=agent.index)

    @property
    def leader(self) -> Agent:
        return self.agents[0]

    def start(self, after_s: float = 2.0, attempt: int = 0, start_s: float = 1.0, kept: tuple[int, ...] = ()) -> None:
        self.at_s += after_s
        self.number += 1
        for agent in self.agents:
            agent.round, agent.attempt = self.number, attempt
            world = len(self.agents) * self.nproc
            agent.write(
                self.at_s,
                "round_formed",
                world_size=world,
                nodes=len(self.agents),
                master="a:1",
                restarts_left=3,
                rank_offset=agent.index * self.nproc,
                role_rank_offset=agent.index * self.nproc,
                role_world_size=world,
            )
            if len(self.agents) > 1:
                agent.compare(self.at_s, self.leader)
        self.at_s += start_s
        for agent in self.agents:
            first = agent.index * self.nproc
            detail = {"kept": kept[agent.index]} if kept else {}  # records of earlier releases have none
            agent.write(self.at_s, "workers_started", tuple(range(first, first + self.nproc)), **detail)

    def step(self, until: int, from_done: int | None = None, each: int = 1) -> None:
        self.done = self.done if from_done is None else from_done
        while self.done < until:
            count = min(each, until - self.done)
            self.done += count
            self.at_s += count * self.step_s
            self.leader.write(
                self.at_s + 0.2,
                "steps_done",
                done=self.done,
                is_counted=True,
                ago_s=0.2,
                total=1000,
                rate=1 / self.step_s,
                phase="",
                values={"loss": 1.0 / self.done},
            )

    def fail(self, reason: str, *, after_s: float = 1.0, stop_s: float = 0.5, **detail: Any) -> None:
        self.at_s += after_s
        self.agents[-1].write(self.at_s, "worker_failed", (len(self.agents) * self.nproc - 1,), reason=reason)
        for agent in self.agents:
            kind = {"kind": "failure", "reason": reason, "hang": False, "joined": False}
            agent.write(self.at_s, "round_broken", **{**kind, **detail})
        self.at_s += stop_s
        for agent in self.agents:
            agent.write(self.at_s, "workers_stopped")

    def end(self, *, succeeded: bool = True, reason: str = "") -> None:
        self.at_s += 1.0
        for agent in self.agents:
            agent.write(self.at_s, "job_ended", succeeded=succeeded, drained=False, reason=reason)
            agent.write(self.at_s, "agent_ended", exit_code=0 if succeeded else 1)

    def list_files(self) -> list[tuple[str, bytes]]:
        return [(f"node{agent.index}", agent.print_lines()) for agent in self.agents]


def make_week(nodes: int = 64, restarts: int = 500) -> Job:
    """Records of a week: a restart every 20 minutes, steps each minute."""
    job = Job(count=nodes, nproc=8, step_s=10.0)
    period_s = 7 * 86400 / restarts
    for attempt in range(restarts):
        job.start(after_s=20.0, attempt=attempt, start_s=30.0)
        for index, agent in enumerate(job.agents):  # no two nodes are quite alike
            for line in agent.lines[-2:]:
                line["monotonic_s"] += (index * 7 + attempt) % 13 / 20
        job.step(job.done + int((period_s - 60) / 10), each=6)
        job.fail(f"rank {attempt % 512} exited with code 1", stop_s=5.0)
    job.end(succeeded=False, reason="no restart is left")
    return job
