"""`local_cwd` and `detached`: TorchX's interface over a supervisor process per app.

Other shells need nothing from this process: an app's state is in its folder, and the registry finds it by the id.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchx.specs import AppDef, AppDryRunInfo, AppState

from muster._shared.contract import HOLD_METADATA
from muster.schedulers.adapter.process_scheduler import ProcessScheduler
from muster.schedulers.local.options import LocalOptions
from muster.schedulers.naming import build_app_name, make_suffix
from muster.schedulers.runner.option_records import parse_options

if TYPE_CHECKING:
    from muster.schedulers.local.request import LocalRequest
    from muster.schedulers.wording.facts import AppFacts


class LocalScheduler(ProcessScheduler):
    """Runs replicas as processes of this machine, in the current directory.

    Args:
        name: `local_cwd`, whose apps end with the command that started them, or `detached`, whose apps keep running.
        session_name: TorchX's name of the session. It is part of the default path of logs.
    """

    option_record = LocalOptions

    def read_facts(self, app_id: str) -> "AppFacts | None":
        """See `PluginScheduler`. For a hold the line says what it runs, or since when it is idle."""
        facts = super().read_facts(app_id)
        if facts is None or HOLD_METADATA not in facts.app.metadata or facts.state is not AppState.RUNNING:
            return facts
        folder = self.find_folder(app_id)
        if folder is None:
            return facts
        from muster.schedulers.local.holds import build_hold, explain_hold

        with self.translate_errors():
            reason = explain_hold(build_hold(folder, folder.read_spec()))
        return replace(facts, reasons=(reason, *facts.reasons))

    # -- submitting -------------------------------------------------------------------------------------------------

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo:
        from muster.schedulers.local.submission import prepare_request

        options = parse_options(LocalOptions, self._run_opts(), cfg)
        name = build_app_name(app.name, make_suffix())
        folder = self.choose_folder(name, options.log_dir)
        return AppDryRunInfo(prepare_request(app, options, name=name, folder=folder), str)

    def schedule(self, dryrun_info: AppDryRunInfo) -> str:
        """Start the app's supervisor and return when all replicas have been started.

        Raises:
            EngineError: the supervisor could not be started. Nothing is left of the app.
            SchedulerError: a script or module does not exist.
        """
        from muster.schedulers.local.submission import build_spec

        request: LocalRequest = dryrun_info.request
        self.start_app(build_spec(request, self.backend), detach=request.detach)
        return request.spec.app_id
