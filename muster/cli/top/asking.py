"""What the view asks, of the schedulers: each call finds the job's scheduler anew, and closes it."""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from torchx.specs import is_terminal

from muster._shared.job_view import JobState
from muster._shared.reports import Answer
from muster.cli import operations
from muster.cli.afterwards import log_folder
from muster.cli.output.log_command import FILES, follow_files, select_rank
from muster.cli.overview import STATE_CODES, read_app, read_listings, sort_apps
from muster.cli.top.picture import JobList, JobPicture, JobRow
from muster.cli.top.state import Deed
from muster.schedulers.adapter.factories import list_properties
from muster.schedulers.adapter.scheduler import LogRequest
from muster.schedulers.wording.job_line import format_details, name_state
from muster.schedulers.wording.reasons import walk

MOST_JOBS: Final = 200
"""The newest of each scheduler."""
_ASKED: Final[Mapping[Deed, Callable[[str], Answer]]] = {
    Deed.STACKS: operations.stacks,
    Deed.WAITS: operations.stacks,
    Deed.CHECKPOINT: operations.checkpoint,
    Deed.STOP: operations.stop,
}


class SchedulerJobs:
    """A `source.Jobs`."""

    def list_jobs(self) -> JobList:
        """See `source.Jobs`."""
        listings = read_listings(list_properties(), MOST_JOBS, are_named=False)
        apps = sort_apps(app for each in listings for app in each.apps)
        return JobList(
            rows=[
                JobRow(handle=app.handle, state=name_state(app.facts), line=format_details(app.facts))
                for app in reversed(apps)
            ],
            unreachable=[each.describe_problem() for each in listings if each.problem],
        )

    def read_job(self, handle: str) -> JobPicture:
        """See `source.Jobs`."""
        name, facts = read_app(handle)
        return JobPicture(
            handle=name,
            state=name_state(facts),
            line=format_details(facts, shows_progress=False),
            reasons=(*walk(facts.reasons), *(each for job in facts.jobs.values() for each in job.trouble)),
            statuses=[(role, job.status) for role, job in facts.jobs.items() if job.status is not None],
            has_ended=is_terminal(facts.state),
            exit_code=STATE_CODES[facts.state],
        )

    def ask(self, deed: Deed, handle: str) -> Answer:
        """See `source.Jobs`. A pause of a job that is paused ends it."""
        if deed is not Deed.PAUSE:
            return _ASKED[deed](handle)
        is_paused = any(status.state is JobState.PAUSED for _, status in self.read_job(handle).statuses)
        return operations.resume(handle) if is_paused else operations.pause(handle)

    def follow_log(self, handle: str, role: str, node_index: int, global_rank: int) -> Iterator[str]:
        """See `source.Jobs`: the rank's files where they are on this machine, else its lines in its node's output."""
        if os.path.isdir(handle):
            run = log_folder.find_run(handle)
            yield from follow_files(
                run, global_rank, None, tuple(FILES.values()), lambda: is_terminal(log_folder.read_run(run).state)
            )
            return
        with operations.open_scheduler(handle) as (scheduler, app_id):

            def has_ended() -> bool:
                facts = scheduler.read_facts(app_id)
                return facts is None or is_terminal(facts.state)

            folder = scheduler.find_run_dir(app_id, role)
            if folder is not None:
                yield from follow_files(folder, global_rank, None, tuple(FILES.values()), has_ended)
                return
            request = LogRequest(role=role, index=node_index, follow=True)
            lines = select_rank(scheduler.read_log(app_id, request), role, global_rank)
            yield from (line.rstrip("\r\n") for line in lines)
