"""The TorchX scheduler `kubernetes`: builds requests offline, and sends them to the cluster."""

import contextlib
import os
import posixpath
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torchx
from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Stream
from torchx.specs import AppDef, AppDryRunInfo, Role, VolumeMount, runopts
from torchx.workspace.api import WorkspaceMixin

from muster._shared.contract import AskKind, AskOutcome, Env, print_line
from muster._shared.control import ControlError, ExitCode, count_nodes
from muster._shared.reports import Answer
from muster.schedulers.adapter.scheduler import LogRequest, PluginScheduler
from muster.schedulers.agent_command import is_agent_role
from muster.schedulers.errors import SchedulerError
from muster.schedulers.kubernetes.labels import WORKSPACE_KEY, find_submitter
from muster.schedulers.kubernetes.manifests.bundles import pack_workspace
from muster.schedulers.kubernetes.manifests.request import Request, build_request
from muster.schedulers.kubernetes.manifests.volumes import is_claim
from muster.schedulers.kubernetes.names import NAME_LIMIT, compute_app_limit, label_roles
from muster.schedulers.kubernetes.options import Options, declare_options, parse_options
from muster.schedulers.naming import build_app_name, make_suffix
from muster.schedulers.runner.option_parsing import StrictOpts
from muster.schedulers.runner.roles import (
    BASE_IMAGE_KEY,
    describe_missing_script,
    describe_unsent_scripts,
    get_workspace_path,
    share_workspace,
)
from muster.schedulers.supervision.registry import find_last_remote, find_state_dir, record_last_remote
from muster.schedulers.wording.facts import AppFacts
from muster.schedulers.workspace.packing import DOCKERFILE, BundleError, describe_left_out

if TYPE_CHECKING:
    from muster.schedulers.kubernetes.api.client import Clock
    from muster.schedulers.kubernetes.live.session import Session
    from muster.schedulers.node_program.pipe import NodePipe

_GONE: Final = (
    "it may have been deleted, removed after its ttl_s, or be in another namespace (name it as NAMESPACE:NAME) or "
    "context; `muster list` lists the jobs of this machine and of the current context's namespace"
)
"""What may have become of an app that is not found, and what to do."""

_UNUSED_DOCKERFILE: Final = (
    f"{DOCKERFILE} is not used: the pods run the role's image; "
    "with -cfg image_repo=REGISTRY/NAME an image is built from it and pushed (needs Docker)"
)


class KubernetesScheduler(PluginScheduler, WorkspaceMixin):  # type: ignore[misc]
    """Runs apps on a Kubernetes cluster. Close it to drop its connections.

    Args:
        name: the scheduler's.
        session_name: TorchX's.
        clock: monotonic time. Tests inject their own.
    """

    def __init__(self, name: str, session_name: str, clock: "Clock | None" = None) -> None:
        super().__init__(name, session_name)
        self._clock = clock
        self._packed_workspaces: dict[str, bytes] = {}
        self._printed: set[str] = set()
        self._open_session: Session | None = None

    @property
    def _session(self) -> "Session":
        """The session with clusters. Loaded when first needed: a dry run must not import it."""
        if self._open_session is None:
            from muster.schedulers.kubernetes.live.session import Session

            self._open_session = Session(clock=self._clock)
        return self._open_session

    # -- offline ----------------------------------------------------------------------------------------------------

    def add_options(self, opts: StrictOpts) -> None:
        """See `options.py`."""
        declare_options(opts)

    def workspace_opts(self) -> runopts:
        """Return no options: `declare_options` declares `image_repo` and `quiet`."""
        return StrictOpts(self.backend)

    def _validate(self, app: AppDef, scheduler: str, cfg: Mapping[str, Any] | None = None) -> None:
        """Check nothing: a role may lack a resource, and building the request checks everything else."""

    def build_workspace_and_update_role(self, role: Role, workspace: str, cfg: Mapping[str, Any]) -> None:
        """Pack the folder for the app's Secret. With `image_repo`, builds an image on top of the role's instead.

        Raises:
            SchedulerError: the folder is too large or cannot be read.
        """
        path = get_workspace_path(workspace)
        try:
            for line in describe_left_out(path):
                self._print_once(line)
            self._print_once(describe_missing_script(role, path, has_image=True))
            if cfg.get("image_repo"):
                report = _discard if cfg.get("quiet") else _print_line
                role.metadata[BASE_IMAGE_KEY] = role.image
                role.image = _load_images().build_image(role.image, path, report)
                return
        except BundleError as error:
            raise SchedulerError(str(error)) from error
        if (Path(path) / DOCKERFILE).exists():
            self._print_once(_UNUSED_DOCKERFILE)
        key, content = pack_workspace(path)
        self._packed_workspaces[key] = content
        role.metadata[WORKSPACE_KEY] = key

    def _print_once(self, text: str) -> None:
        """Print a text once: TorchX packs the same folder once for every role."""
        if text and text not in self._printed:
            self._printed.add(text)
            _print_line(text)

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo:
        options = parse_options(cfg)
        app = share_workspace(app, WORKSPACE_KEY)
        images: Mapping[str, Any] = {}
        if options.image_repo:
            app, images = _plan_images(app, cfg)
        else:
            for line in describe_unsent_scripts(app, WORKSPACE_KEY):
                self._print_once(line)
        for role in app.roles:
            self._print_once(_describe_default_image(role))
            self._print_once(_describe_lost_paths(role))
        name = _build_name(app, options)
        request = build_request(
            app,
            cfg,
            name=name,
            workspaces=self._packed_workspaces,
            images_to_push=images,
            submitter=find_submitter(),
        )
        return AppDryRunInfo(request, str)

    # -- with a cluster ---------------------------------------------------------------------------------------------

    def schedule(self, dryrun_info: AppDryRunInfo) -> str:
        """Push the images, if any, then creates all objects or none."""
        request: Request = dryrun_info.request
        if request.images_to_push:
            _load_images().push_images(request.images_to_push)
        app_id = self._session.submit(request)
        self._submitted.add(app_id)
        with contextlib.suppress(OSError):  # `last` then finds no app
            record_last_remote(find_state_dir(os.environ), self.backend, app_id)
        return app_id

    def describe_app(self, app_id: str) -> DescribeAppResponse | None:
        """Return the app's state, with reasons."""
        return self._session.describe(app_id)

    def describe_place(self, app_id: str | None) -> str:
        """Name the namespace and the context in which an app is looked for. None: those of an app without any."""
        return self._session.describe_place(app_id)

    def describe_unknown(self, app_id: str) -> str:
        """See `PluginScheduler`. It may be the app that was submitted last from here."""
        found = find_last_remote(find_state_dir(os.environ), self.backend)
        last_id = "" if found is None else found[1]
        if last_id and app_id in (last_id, last_id.split(":")[1]):
            place = "the cluster of this kubeconfig"
            return (
                f"{last_id}, the last job that was submitted to Kubernetes from here, no longer exists in {place}: "
                f"{self.properties.deleted}"
            )
        name = app_id.split(":")[1] if ":" in app_id else app_id
        return f"there is no job {name!r} in {self.describe_place(app_id)}: {_GONE}"

    def find_named(self, word: str) -> tuple[Sequence[str], str]:
        """See `PluginScheduler`. Without a kubeconfig nothing is looked up, even in a pod."""
        if ":" in word:
            return [word], ""
        if not os.environ.get("KUBECONFIG") and not os.path.exists(os.path.expanduser("~/.kube/config")):
            return [], ""
        listed = [str(each.app_id) for each in self.list_apps({})]
        found = [app_id for app_id in listed if app_id.partition(":")[2].startswith(word)]
        last = find_last_remote(find_state_dir(os.environ), self.backend)  # perhaps not of the context's namespace
        if not found and last is not None and last[1].split(":")[1].startswith(word):
            if self.describe_app(last[1]) is None:
                raise ControlError(self.describe_unknown(last[1]), ExitCode.UNKNOWN)
            found = [last[1]]
        return found, f"no job is named {word!r} on this machine or in {self.describe_place(None)}: {_GONE}"

    def read_facts(self, app_id: str) -> AppFacts | None:
        """See `PluginScheduler`. How far the app is needs the right to `pods/exec`."""
        return self._session.read_facts(app_id, asks_agents=True)

    def read_run_file(self, app_id: str, role: str, index: int, name: str, limit_bytes: int) -> bytes | None:
        """See `PluginScheduler`. It reads only from pods that run, and needs the right to `pods/exec`."""
        return self._session.read_run_file(app_id, role, index, name, limit_bytes)

    def read_log(self, app_id: str, request: LogRequest) -> Iterable[str]:
        """Return the log of one node, over all its pods. See `live.logs`.

        Raises:
            SchedulerError: no such app or role, or a single stream was requested.
        """
        if request.stream != Stream.COMBINED:
            text = f"Kubernetes keeps stdout and stderr in one log: --streams {request.stream.value} is not available"
            raise SchedulerError(text)
        lines = self._session.read_log(
            app_id, request.role, request.index, since=request.since, until=request.until, tail=request.follow
        )
        return filter(request.matches, lines)

    def list_apps(self, cfg: Mapping[str, Any]) -> list[ListAppResponse]:
        """Return the apps of one namespace: `cfg`'s, or else the context's."""
        return self._session.list_apps(parse_options(cfg))

    def _cancel_existing(self, app_id: str) -> None:
        self._session.cancel(app_id)

    def ask_app(self, app_id: str, kind: AskKind, limit_s: float) -> Answer:
        """See `PluginScheduler`. Needs the right to `pods/exec`."""
        return self._session.ask(app_id, kind, limit_s)

    def stop_app(self, app_id: str, limit_s: float) -> Answer:
        """See `PluginScheduler`. Needs the right to `pods/exec`."""
        return self._session.stop(app_id, limit_s)

    def run_in_node(
        self, app_id: str, role: str, index: int, command: Sequence[str], limit_s: float
    ) -> tuple[int, str, str]:
        """See `PluginScheduler`. Needs the right to `pods/exec`."""
        return self._session.run_in_node(app_id, role, index, command, limit_s)

    def open_in_node(self, app_id: str, role: str, index: int, words: Sequence[str]) -> "NodePipe":
        """See `PluginScheduler`: `kubectl exec`. It needs the right to `pods/exec`."""
        return self._session.open_in_node(app_id, role, index, words)

    def end_node(self, app_id: str, role: str, index: int) -> bool:
        """See `PluginScheduler`. Needs the right to delete pods."""
        self._session.end_node(app_id, role, index)
        return True

    def delete_app(self, app_id: str) -> None:
        """Delete an app and everything that belongs to it."""
        self._session.delete(app_id)

    def delete_unfinished(self, app_id: str) -> bool:
        """See `PluginScheduler`. Deletes only what has the labels of the app."""
        return self._session.delete(app_id)

    def resize_app(self, app_id: str, nodes: int, role: str | None) -> Answer:
        """See `PluginScheduler` and `operations.resize`."""
        self._session.resize(app_id, nodes, role)
        return Answer(outcome=AskOutcome.DONE, line=f"{app_id} has {count_nodes(nodes)} from now on")

    def close(self) -> None:
        """Drop all connections. Idempotent."""
        super().close()
        if self._open_session is not None:
            self._open_session.close()
            self._open_session = None


def _build_name(app: AppDef, options: Options) -> str:
    labels = label_roles([role.name for role in app.roles]) if app.roles else ["app"]
    nodes = max((role.num_replicas for role in app.roles), default=1)
    limit = compute_app_limit(labels, options.flavor, nodes)
    return build_app_name(app.name, make_suffix(), reserve=NAME_LIMIT - limit)


def _describe_default_image(role: Role) -> str:
    """Say which image runs because none was chosen. "": one was, or the role runs no agent."""
    if role.image != torchx.IMAGE or not is_agent_role(role):
        return ""
    return f"the pods run {role.image}, TorchX's default image; --image chooses another, with your torch"


def _describe_lost_paths(role: Role) -> str:
    """Say that the path of a checkpoint on a volume may be lost with the pods. "": it is kept, or has no volume."""
    mounts = [each for each in role.mounts if isinstance(each, VolumeMount) and not each.read_only]
    # The manifest refuses other folders. Of all sources only claims outlive pods and can be written.
    folders = [each.dst_path for each in mounts if posixpath.isabs(each.dst_path) and is_claim(each.src)]
    if not folders or Env.LOG_DIR in role.env or not is_agent_role(role):
        return ""
    name = shlex.quote(posixpath.join(folders[0], "muster"))
    return (
        f"add --env {Env.LOG_DIR}={name}: it keeps the path of the last checkpoint on the volume if all pods are "
        "replaced at once"
    )


def _plan_images(app: AppDef, cfg: Mapping[str, Any]) -> tuple[AppDef, Mapping[str, Any]]:
    """Return a copy of the app with the names that its images will have in the registry, and what to push."""
    named = replace(app, roles=[replace(role) for role in app.roles])
    return named, _load_images().plan_images(named, cfg)


def _load_images() -> Any:
    """Return the module, which only `image_repo` loads."""
    from muster.schedulers.kubernetes import images

    return images


def _print_line(text: str) -> None:
    print_line(f"muster: {text}")


def _discard(text: str) -> None:
    del text
