"""`muster top` over jobs that are made up: argv is the sample, its ranks and nodes; what is asked goes to a file."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from doubles import job_samples

from muster._shared.contract import AskOutcome
from muster._shared.control import ControlError, CommandExit
from muster._shared.reports import Answer, Stack
from muster.cli.top.app import run
from muster.cli.top.picture import JobList, JobPicture, JobRow
from muster.cli.top.screen import ClosedError
from muster.cli.top.state import KeyAction


class SampleJobs:
    """A `Jobs`."""

    def __init__(self, sample: str, ranks: int, nodes: int) -> None:
        self._status = getattr(job_samples, f"make_{sample}")(*((ranks, nodes) if sample != "waiting" else (nodes,)))

    def list_jobs(self) -> JobList:
        rows = [JobRow(handle=f"local_cwd://job-{at}", state="RUNNING", line=f"attempt {at}") for at in range(3)]
        return JobList(rows=rows, unreachable=["kubernetes is not reachable: no cluster"])

    def read_job(self, handle: str) -> JobPicture:
        if handle == "gone":
            raise ControlError("local_cwd knows no app 'gone'", CommandExit.UNKNOWN)
        return JobPicture(handle=handle, state="RUNNING", line="attempt 1", statuses=[("train", self._status)])

    def ask(self, action: KeyAction, handle: str) -> Answer:
        with open(os.environ["ASKED_FILE"], "a") as file:
            file.write(f"{action.value} {handle}\n")
        stacks = (Stack(global_rank=1, node=0, local_rank=1, text="main.py:12 in train"),)
        has_stacks = action in (KeyAction.STACKS, KeyAction.WAITS)
        return Answer(outcome=AskOutcome.DONE, line=f"answer of {action.value}", stacks=stacks if has_stacks else ())

    def follow_log(self, handle: str, role: str, node_index: int, global_rank: int) -> Iterator[str]:
        for at in range(1000):
            yield f"line {at} of rank {global_rank}"
        yield "the needle\x1b[2J"
        while True:
            time.sleep(0.05)
            yield "one more"


def main() -> int:
    sample, ranks, nodes, *handles = sys.argv[1:]
    try:
        failure, _ = run(SampleJobs(sample, int(ranks), int(nodes)), handles[0] if handles else None)
    except ClosedError as error:
        return error.code
    except KeyboardInterrupt:
        return 130
    print(f"failure: {failure}" if failure else "left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
