"""What the view asks, of the schedulers: each call finds the job's scheduler anew, and closes it. It may take long."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from torchx.specs import is_terminal

from muster._shared.job_view import JobState
from muster._shared.reports import Answer
from muster.cli import operations
from muster.cli.output.log_command import FILES, follow_files, has_ended, select_rank
from muster.cli.overview import STATE_CODES, open_job, read_app, read_listings, sort_apps
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


class Jobs:
    """All jobs, of all schedulers."""

    def list_jobs(self) -> JobList:
        """Return all jobs of all schedulers that answer."""
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
        """Return one job.

        Raises:
            ControlError: it cannot be read.
        """
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
        """Ask for what a key means. A pause of a job that is paused ends it.

        Raises:
            ControlError: it cannot be asked.
        """
        if deed is not Deed.PAUSE:
            return _ASKED[deed](handle)
        is_paused = any(status.state is JobState.PAUSED for _, status in self.read_job(handle).statuses)
        return operations.resume(handle) if is_paused else operations.pause(handle)

    def follow_log(self, handle: str, role: str, node_index: int, global_rank: int) -> Iterator[str]:
        """Return the lines of one rank, and those that come, without their ends.

        They are those of its files where these are on this machine, or else those in the output of its node.

        Args:
            handle: of the job.
            role: of the rank.
            node_index: of the node that it runs on.
            global_rank: its number.

        Raises:
            ControlError: there is none.
        """
        with open_job(handle) as (scheduler, app_id):
            folder = scheduler.find_run_dir(app_id, role)
            if folder is not None:
                files = tuple(FILES.values())
                yield from follow_files(folder, global_rank, None, files, lambda: has_ended(scheduler, app_id))
                return
            lines = scheduler.read_log(app_id, LogRequest(role=role, index=node_index, follow=True))
            yield from (line.rstrip("\r\n") for line in select_rank(lines, global_rank))
