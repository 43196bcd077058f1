"""Answers `muster log` for a job that was started by hand.

No scheduler knows the job, and its folder has the ranks' files.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from torchx.schedulers.api import DescribeAppResponse

from muster.schedulers.adapter.properties import Properties
from muster.schedulers.adapter.scheduler import LogRequest, read_run_file
from muster.schedulers.adapter.status import build_status
from muster.schedulers.wording.facts import AppFacts


class RunFolder:
    """Answers as a scheduler does. The output of its nodes is on their consoles.

    Args:
        folder: of the run.
        read: reads what is known of the job.
    """

    backend = ""
    properties = Properties()

    def __init__(self, folder: Path, read: Callable[[Path], AppFacts]) -> None:
        self.folder = folder
        self._read = read

    def read_facts(self, app_id: str) -> AppFacts:  # noqa: ARG002
        """See `PluginScheduler`."""
        return self._read(self.folder)

    def describe_app(self, app_id: str) -> DescribeAppResponse:
        """See `PluginScheduler`."""
        return build_status(self.read_facts(app_id))

    def find_run_dir(self, app_id: str, role: str) -> Path:  # noqa: ARG002
        """Return the folder."""
        return self.folder

    def read_run_file(self, app_id: str, role: str, index: int, name: str, limit_bytes: int) -> bytes | None:  # noqa: ARG002
        """See `PluginScheduler`."""
        return read_run_file(self.folder, name, limit_bytes)

    def read_log(self, app_id: str, request: LogRequest) -> Sequence[str]:  # noqa: ARG002
        """Return no lines."""
        return ()

    def count_merged_ranks(self, app_id: str, role: str) -> int:  # noqa: ARG002
        """Return 0: no line is merged."""
        return 0
