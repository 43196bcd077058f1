"""What TorchX and `muster` ask. All but the submission is inherited."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchx.specs import AppDef, AppDryRunInfo, Role
from torchx.workspace.api import WorkspaceMixin

from folders.request import WORKSPACE, FolderOptions, build_spec, show
from muster.schedulers.adapter import (
    AppSpec,
    ProcessScheduler,
    StrictOpts,
    build_app_name,
    declare_options,
    get_workspace_path,
    make_secret,
    make_suffix,
    parse_options,
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The result of a dry run, which `schedule` carries out."""

    spec: AppSpec
    detach: bool


class FolderScheduler(ProcessScheduler, WorkspaceMixin[None]):
    """Replicas are processes of this machine, each in a folder of its own."""

    def add_options(self, opts: StrictOpts) -> None:
        """See `PluginScheduler`; apps outlive the command that submits them unless `detach=false`."""
        declare_options(opts, FolderOptions, {"detach": True, "path": os.environ.get("PATH", os.defpath)})

    def build_workspace_and_update_role(self, role: Role, workspace: str, cfg: Mapping[str, Any]) -> None:
        """Take the folder of `--workspace`; TorchX calls this before the dry run."""
        role.metadata[WORKSPACE] = os.path.abspath(get_workspace_path(workspace))

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo:
        options = parse_options(FolderOptions, self._run_opts(), cfg)
        app_id = build_app_name(app.name, make_suffix())
        folder = self.choose_folder(app_id)
        spec = build_spec(app, options, app_id=app_id, folder=folder, token=make_secret())
        return AppDryRunInfo(Request(spec=spec, detach=options.detach), lambda request: show(request.spec))

    def schedule(self, dryrun_info: AppDryRunInfo) -> str:
        """Start the app; nothing is left of it if that fails."""
        request: Request = dryrun_info.request
        self.start_app(request.spec, detach=request.detach)
        return request.spec.app_id
