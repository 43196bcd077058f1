"""The TorchX scheduler `kubernetes`: joins the pure parts to the cluster."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Stream
from torchx.specs import AppDef, AppDryRunInfo, Role, runopts
from torchx.workspace.api import WorkspaceMixin

from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.kubernetes.manifests.bundles import METADATA_KEY, pack_workspace
from muster.schedulers.kubernetes.manifests.request import Request, build_request
from muster.schedulers.kubernetes.names import LIMIT, app_limit, label_roles
from muster.schedulers.kubernetes.options import Options, declare_options, parse_options
from muster.schedulers.naming import build_app_name, make_suffix
from muster.schedulers.runner.options import StrictOpts
from muster.schedulers.runner.versions import LogRequest, PluginScheduler, build_dryrun_info, get_workspace_path

if TYPE_CHECKING:
    from muster.schedulers.kubernetes.api.client import Pace
    from muster.schedulers.kubernetes.live.logs import Slots
    from muster.schedulers.kubernetes.live.session import Session

BACKEND: Final = "kubernetes"


class KubernetesScheduler(PluginScheduler, WorkspaceMixin):  # type: ignore[misc]
    """Runs apps on a Kubernetes cluster. Close it to drop its connections.

    Args:
        session_name: TorchX's.
        pace: time; tests give their own.
        slots: bound of the log readers' connections.
    """

    def __init__(self, session_name: str, pace: "Pace | None" = None, slots: "Slots | None" = None) -> None:
        super().__init__(BACKEND, session_name)
        self._pace = pace
        self._slots = slots
        self._packed: dict[str, bytes] = {}
        self._opened: Session | None = None

    @property
    def _session(self) -> "Session":
        """What talks to clusters; loaded when first needed, since a dry run must stay light."""
        if self._opened is None:
            from muster.schedulers.kubernetes.live.session import Session

            self._opened = Session(pace=self._pace, slots=self._slots)
        return self._opened

    # -- before anything is sent ------------------------------------------------------------------------------------

    def add_options(self, opts: StrictOpts) -> None:
        """See `options.py`."""
        declare_options(opts)

    def workspace_opts(self) -> runopts:
        """None of its own: `image_repo` and `quiet` stand among the others."""
        return StrictOpts(BACKEND)

    def _validate(self, app: AppDef, scheduler: str, cfg: Mapping[str, Any] | None = None) -> None:
        """Nothing: a role without a resource is fine here, everything else is checked while the request is built."""

    def build_workspace_and_update_role(self, role: Role, workspace: str, cfg: Mapping[str, Any]) -> None:
        """Packs the folder for the ConfigMap; with `image_repo`, builds an image on top of the role's instead.

        Raises:
            SchedulerError: the folder does not fit or cannot be read.
        """
        path = get_workspace_path(workspace)
        if cfg.get("image_repo"):
            _open_image_builder().build_workspace_and_update_role(role, f"file://{Path(path).resolve()}", cfg)
            return
        key, content = pack_workspace(path)
        if content:
            self._packed[key] = content
            role.metadata[METADATA_KEY] = key

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo:
        options = parse_options(cfg)
        images: Mapping[str, Any] = {}
        if options.image_repo:
            app, images = _name_images(app, cfg)
        name = _make_name(app, options)
        request = build_request(app, cfg, name=name, workspaces=self._packed, images_to_push=images)
        return build_dryrun_info(request, str)

    # -- what needs a cluster ---------------------------------------------------------------------------------------

    def schedule(self, dryrun_info: AppDryRunInfo) -> str:
        """Pushes images if there are any, then creates everything or nothing."""
        request: Request = dryrun_info.request
        if request.images_to_push:
            _open_image_builder().push_images(request.images_to_push)
        return self._session.submit(request)

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """The app's state, with reasons. Stops the other roles of an app of several Jobs once one has failed."""
        return self._session.describe(app_id)

    def read_log(self, app_id: str, request: LogRequest) -> Iterable[str]:
        """The log of one node over all its pods; see `logs.py`.

        Raises:
            SchedulerError: no such app or role, or a stream of its own was asked for.
        """
        if request.stream != Stream.COMBINED:
            text = f"Kubernetes keeps stdout and stderr together; --streams {request.stream.value} cannot be had"
            raise SchedulerError(text)
        lines = self._session.read_log(
            app_id, request.role, request.index, since=request.since, until=request.until, tail=request.follow
        )
        return filter(request.matches, lines)

    def list_apps(self, cfg: Mapping[str, Any]) -> list[ListAppResponse]:
        """The apps of a namespace: the context's, or the one `cfg` names."""
        return self._session.list_apps(parse_options(cfg))

    def _cancel_existing(self, app_id: str) -> None:
        self._session.cancel(app_id)

    def delete_app(self, app_id: str) -> None:
        """Deletes an app with everything that belongs to it."""
        self._session.delete(app_id)

    def resize(self, app_id: str, nodes: int) -> None:
        """Gives an elastic app another number of nodes within its min:max. See `operations.resize`."""
        self._session.resize(app_id, nodes)

    def close(self) -> None:
        """Drops all connections. Idempotent."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def create_scheduler(session_name: str, **kwargs: Any) -> KubernetesScheduler:  # noqa: ARG001 - TorchX passes every scheduler's
    """TorchX's entry point."""
    return KubernetesScheduler(session_name)


def _make_name(app: AppDef, options: Options) -> str:
    labels = label_roles([role.name for role in app.roles]) if app.roles else ["app"]
    nodes = max((role.num_replicas for role in app.roles), default=1)
    limit = app_limit(labels, options.flavor, nodes)
    return build_app_name(app.name, make_suffix(), reserve=LIMIT - limit)


def _name_images(app: AppDef, cfg: Mapping[str, Any]) -> tuple[AppDef, Mapping[str, Any]]:
    """A copy of the app with the names its images will have in the registry, and what to push."""
    named = replace(app, roles=[replace(role) for role in app.roles])
    images: Mapping[str, Any] = _open_image_builder().dryrun_push_images(named, cfg)
    return named, images


def _open_image_builder() -> Any:
    """TorchX's own builder of patched images; needs a Docker engine, so only when asked for."""
    try:
        from torchx.workspace.docker_workspace import DockerWorkspaceMixin
    except ImportError as error:
        raise EngineError(f"image_repo needs the docker package: pip install docker ({error})") from error
    return DockerWorkspaceMixin()
