"""Starts workers through one starter and waits for their ends: the agent's loop and reaper without the supervisor.

    python fidelity_driver.py REQUEST.json

The request: how ("cold" or "warm"), kind, target, args, env, nproc, preload, folder, rounds, worker_env, cpus,
template_cpus, stacks, own_streams (workers share the driver's), hold (start none), each (of each round the worker's
programs, as {"target", "args"}, in place of nproc and rounds). Each worker's output goes to
`<folder>/<round>.<local_rank>.{out,err}`, its error and stack files beside it (.json, .stack). At the end
`<folder>/result.json` has codes, records, notices, failed.
"""

import json
import os
import signal
import sys
from typing import Any

from muster._shared import processes
from muster.agent.runtime.loop import Loop
from muster.agent.runtime.signals import ChildWatch, SignalWatch
from muster.agent.workers.cold import CommandStarter
from muster.agent.workers.spec import Program, ProgramKind, WorkerSpec, WorkerStarter
from muster.agent.workers.warm.starter import TemplateStarter
from muster.agent.workers.warm.template_handle import TemplateOptions


class Driver:
    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.loop = Loop()
        self.records: list[dict[str, Any]] = []
        self.notices: list[str] = []
        self.codes: dict[int, int] = {}
        self.children = ChildWatch(self.loop)
        self.failed: dict[int, str] = {}
        self.program = Program(
            kind=ProgramKind(request["kind"]), target=request["target"], args=tuple(request.get("args", ()))
        )
        self.env: dict[str, str] = request.get("env") or dict(os.environ)
        self.rounds: list[list[Program]] = [
            [Program(kind=self.program.kind, target=one["target"], args=tuple(one["args"])) for one in part]
            for part in request.get("each", ())
        ] or [[self.program] * int(request.get("nproc", 1))] * int(request.get("rounds", 1))
        self.nproc = len(self.rounds[0])
        self.starter = self.build_starter()

    def build_starter(self) -> WorkerStarter:
        cold = CommandStarter()
        if self.request["how"] == "cold":
            return cold
        options = TemplateOptions(
            program=self.program,
            nproc=self.nproc,
            env=self.env,
            preload=self.request.get("preload", "auto"),
            cpus=self.choose_cpus("template_cpus") or self.choose_cpus("cpus"),
        )
        return TemplateStarter(
            self.loop, self.children, cold, options, on_notice=self.notices.append, on_record=self.record
        )

    def record(self, what: str, **detail: Any) -> None:
        self.records.append({"what": what, **detail})

    def run(self) -> None:
        processes.become_subreaper()
        watch = SignalWatch(self.loop, self.children, handled=(), on_signal=lambda _: None, on_stacks=lambda: None)
        self.starter.prepare(lambda: None, lambda: None)
        while self.request.get("hold"):  # until it is killed
            self.loop.turn()
        rounds = [self.run_round(number, programs) for number, programs in enumerate(self.rounds)]
        self.starter.close()
        watch.close()
        self.children.close()
        self.loop.close()
        result = {"codes": rounds, "records": self.records, "notices": self.notices, "failed": self.failed}
        with open(os.path.join(self.request["folder"], "result.json"), "w", encoding="utf-8") as file:
            json.dump(result, file)

    def started(self, local_rank: int, pid: int) -> None:
        self.children.watch(pid, lambda code: self.codes.__setitem__(local_rank, code))

    def run_round(self, number: int, programs: list[Program]) -> list[int]:
        self.codes.clear()
        files: list[int] = []
        specs = [self.build_spec(number, rank, program, files) for rank, program in enumerate(programs)]
        self.starter.start(specs, self.started, self.failed.__setitem__)
        while len(self.codes) + len(self.failed) < len(programs):
            self.loop.turn()
        for fd in files:
            os.close(fd)
        return [self.codes.get(local_rank, 1000) for local_rank in range(len(programs))]

    def choose_cpus(self, key: str) -> frozenset[int] | None:
        return frozenset(self.request[key]) if key in self.request else None

    def build_spec(self, number: int, local_rank: int, program: Program, files: list[int]) -> WorkerSpec:
        stem = os.path.join(self.request["folder"], f"{number}.{local_rank}")
        out, err = 1, 2
        if not self.request.get("own_streams"):
            out, err = (os.open(f"{stem}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in ("out", "err"))
            files += [out, err]
        parent = str(os.getpid())
        return WorkerSpec(
            local_rank=local_rank,
            program=program,
            env={**self.env, **self.request.get("worker_env", {}), "RANK": str(local_rank), "PROBE_PARENT": parent},
            stdout_fd=out,
            stderr_fd=err,
            cpus=self.choose_cpus("cpus"),
            error_file=f"{stem}.json",
            stack_file=f"{stem}.stack" if self.request.get("stacks") else "",
            crash_file=f"{stem}.stack" if self.request.get("stacks") and self.request.get("own_streams") else "",
        )


if __name__ == "__main__":
    signal.alarm(170)
    with open(sys.argv[1], encoding="utf-8") as request_file:
        Driver(json.load(request_file)).run()
