"""The TorchX scheduler `kubernetes`: builds requests offline, and sends them to the cluster."""

import contextlib
import os
import posixpath
import shlex
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torchx
from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Stream
from torchx.specs import AppDef, AppDryRunInfo, AppState, Role, VolumeMount
from torchx.workspace.api import WorkspaceMixin

from muster._shared.contract import AskKind, AskOutcome, Env, print_line
from muster._shared.control import CommandExit, ControlError, count_nodes
from muster._shared.reports import Answer
from muster.schedulers.adapter.scheduler import LogRequest, PluginScheduler
from muster.schedulers.adapter.status import build_status, check_replica
from muster.schedulers.agent_command import is_agent_role
from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.kubernetes import kube
from muster.schedulers.kubernetes.api.client import Client, Clock
from muster.schedulers.kubernetes.api.connection import Access
from muster.schedulers.kubernetes.api.objects import Objects
from muster.schedulers.kubernetes.manifests.bundles import pack_workspace
from muster.schedulers.kubernetes.manifests.pod import is_claim
from muster.schedulers.kubernetes.manifests.request import Request, build_request
from muster.schedulers.kubernetes.options import Options, parse_options
from muster.schedulers.kubernetes.running_apps import agent_requests
from muster.schedulers.kubernetes.running_apps.app import App, AppRef, delete, parse_app_id, resize
from muster.schedulers.kubernetes.running_apps.cancelling import RoleStop, cancel
from muster.schedulers.kubernetes.running_apps.logs import READ_LIMIT, NodeLog, Pods, forget_logs
from muster.schedulers.kubernetes.running_apps.observation import END_STATES, Observer
from muster.schedulers.kubernetes.running_apps.status import build_facts
from muster.schedulers.kubernetes.running_apps.submit import submit
from muster.schedulers.naming import build_app_name, make_suffix
from muster.schedulers.node_program.pipe import NodePipe
from muster.schedulers.runner import callers
from muster.schedulers.runner.roles import (
    BASE_IMAGE_KEY,
    describe_unsent_scripts,
    describe_workspace,
    get_workspace_path,
    share_workspace,
)
from muster.schedulers.supervision.registry import find_last_remote, find_state_dir, record_last_remote
from muster.schedulers.timestamps import build_timestamp
from muster.schedulers.wording.facts import AppFacts
from muster.schedulers.workspace.packing import DOCKERFILE, BundleError

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
    """Runs apps as pods of a Kubernetes cluster.

    It has one client per kubeconfig and context. Close it to drop its connections. It is safe to use from several
    threads: TorchX reads logs in many.

    Args:
        name: the scheduler's.
        session_name: TorchX's.
        clock: monotonic time. Tests inject their own.
    """

    option_record = Options

    def __init__(self, name: str, session_name: str, clock: Clock | None = None) -> None:
        super().__init__(name, session_name)
        self._clock: Clock = clock or Clock()
        self._packed_workspaces: dict[str, bytes] = {}
        self._clients: dict[Access, Client] = {}
        self._log_reads = threading.BoundedSemaphore(READ_LIMIT)
        self._followed: dict[str, Pods] = {}
        self._role_stops: list[RoleStop] = []
        self._observer = Observer()

    # -- offline ----------------------------------------------------------------------------------------------------

    def build_workspace_and_update_role(self, role: Role, workspace: str, cfg: Mapping[str, Any]) -> None:
        """Pack the folder for the app's Secret. With `image_repo`, builds an image on top of the role's instead.

        Raises:
            SchedulerError: the folder is too large or cannot be read.
        """
        path = get_workspace_path(workspace)
        self.print_once(*describe_workspace(role, path, has_image=True))
        try:
            if cfg.get("image_repo"):
                report = (lambda _: None) if cfg.get("quiet") else _print_line
                role.metadata[BASE_IMAGE_KEY] = role.image
                role.image = _load_images().build_image(role.image, path, report)
                return
        except BundleError as error:
            raise SchedulerError(str(error)) from error
        if (Path(path) / DOCKERFILE).exists():
            self.print_once(_UNUSED_DOCKERFILE)
        key, content = pack_workspace(path)
        self._packed_workspaces[key] = content
        role.metadata[kube.WORKSPACE_KEY] = key

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo:
        options = parse_options(cfg)
        app = share_workspace(app, kube.WORKSPACE_KEY)
        images: Mapping[str, Any] = {}
        if options.image_repo:
            # A copy, with the names that the images will have in the registry.
            app = replace(app, roles=[replace(role) for role in app.roles])
            images = _load_images().plan_images(app, cfg)
        else:
            self.print_once(*describe_unsent_scripts(app, kube.WORKSPACE_KEY))
        for role in app.roles:
            self.print_once(_describe_default_image(role), _describe_lost_paths(role))
        name = _build_name(app, options)
        request = build_request(
            app,
            cfg,
            name=name,
            workspaces=self._packed_workspaces,
            images_to_push=images,
            submitter=kube.find_submitter(),
        )
        return AppDryRunInfo(request, str)

    # -- with a cluster ---------------------------------------------------------------------------------------------

    def _open(self, access: Access) -> Objects:
        return Objects(self._clients.setdefault(access, Client(access, clock=self._clock, notify=_print_line)))

    def _open_place(self, options: Options) -> tuple[Objects, Access, str]:
        """Return the cluster and the namespace that the options name.

        If they name no namespace, it is the context's.
        """
        access = Access(kubeconfig=options.kubeconfig, context=options.context)
        resources = self._open(access)
        return resources, access, options.namespace or resources.client.connection.namespace

    def _find(self, app_id: str) -> App:
        if ":" not in app_id:
            app_id = f"{self._open(Access()).client.connection.namespace}:{app_id}"
        ref = parse_app_id(app_id)
        return App(resources=self._open(ref.access), ref=ref)

    def schedule(self, dryrun_info: AppDryRunInfo) -> str:
        """Push the images, if any, then creates all objects or none."""
        request: Request = dryrun_info.request
        if request.images_to_push:
            _load_images().push_images(request.images_to_push)
        resources, access, namespace = self._open_place(request.inputs.options)
        app = App(resources=resources, ref=AppRef(namespace=namespace, name=request.inputs.name, access=access))
        submit(app, request, _print_line)
        if request.has_several_jobs:
            self._role_stops.append(RoleStop(app, notify=_print_line))
        app_id = str(app.ref)
        self._submitted.add(app_id)
        with contextlib.suppress(OSError):  # `last` then finds no app
            record_last_remote(find_state_dir(os.environ), self.backend, app_id)
        return app_id

    def describe_app(self, app_id: str) -> DescribeAppResponse | None:
        """Return the app's state, with reasons. Return None if it does not exist.

        Only `torchx status` runs a command in a pod for it: programs look again and again. It changes nothing, unless
        TorchX's `Runner.cancel` asks: of an app that has failed, other roles may run, and TorchX would leave them.

        Raises:
            EngineError: TorchX's `Runner.wait` waits for an app that has ended, and how is not known. It takes UNKNOWN
                for a state that passes, and would never return.
        """
        facts = self._read_facts(app_id, asks_agents=callers.shows_status())
        if facts is None:
            return None
        response = build_status(facts)
        if response.state is AppState.UNKNOWN and callers.is_wait():
            raise EngineError(f"{app_id} has ended as UNKNOWN: {response.msg}; the roles that are left have succeeded")
        if response.state is AppState.FAILED and callers.is_cancel():
            self._cancel_existing(app_id)
        return response

    def read_facts(self, app_id: str) -> AppFacts | None:
        """See `PluginScheduler`. How far the app is needs the right to `pods/exec`."""
        return self._read_facts(app_id, asks_agents=True)

    def _read_facts(self, app_id: str, *, asks_agents: bool) -> AppFacts | None:
        app = self._find(app_id)
        found = self._observer.observe(app)
        if found is None:
            return None
        observation, state = found
        if asks_agents and state is AppState.RUNNING:
            jobs, restarts = (
                agent_requests.read_jobs(app, observation),
                agent_requests.read_restarts(app, observation.pods),
            )
            observation = replace(observation, jobs=jobs, restarts=restarts)
        return build_facts(app_id, observation)

    def describe_place(self, app_id: str | None) -> str:
        """Name the namespace and the context in which an app is looked for. None: those of an app without any."""
        if app_id is None:
            connection = self._open(Access()).client.connection
            return f"namespace {connection.namespace!r} of {connection.origin}"
        app = self._find(app_id)
        return f"namespace {app.ref.namespace!r} of {app.resources.client.connection.origin}"

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
                raise ControlError(self.describe_unknown(last[1]), CommandExit.UNKNOWN)
            found = [last[1]]
        return found, f"no job is named {word!r} on this machine or in {self.describe_place(None)}: {_GONE}"

    def list_apps(self, cfg: Mapping[str, Any]) -> list[ListAppResponse]:
        """Return the apps of one namespace: `cfg`'s, or else the context's."""
        return self._observer.list_apps(*self._open_place(parse_options(cfg)))

    def read_run_file(self, app_id: str, role: str, index: int, name: str, limit_bytes: int) -> bytes | None:
        """See `PluginScheduler`. It reads only from pods that run, and needs the right to `pods/exec`."""
        return agent_requests.read_run_file(self._find(app_id), role, index, name, limit_bytes)

    def read_log(self, app_id: str, request: LogRequest) -> Iterable[str]:
        """Return the log of one node, over all its pods. See `running_apps.logs`.

        Raises:
            SchedulerError: no such app or role, or a single stream was requested.
        """
        if request.stream != Stream.COMBINED:
            text = f"Kubernetes keeps stdout and stderr in one log: --streams {request.stream.value} is not available"
            raise SchedulerError(text)
        app = self._find(app_id)
        roles = app.list_roles()
        replicas = {name: role.num_replicas for name, (_, role) in roles.items()}
        check_replica(app_id, replicas, request.role, request.index)
        label, role = roles[request.role]
        log = NodeLog(
            app=app,
            pods=self._find_pods(app_id, app) if request.follow else Pods(app, lambda: True),
            reads=self._log_reads,
            role=label,
            index=request.index,
            since=None if request.since_s is None else build_timestamp(request.since_s),
            until=None if request.until_s is None else build_timestamp(request.until_s),
            tail=request.follow,
            log_dir=role.env.get(Env.LOG_DIR, ""),
        )
        return filter(request.matches, log.read())

    def _find_pods(self, app_id: str, app: App) -> Pods:
        """Return the same for all readers that follow an app."""

        def has_ended() -> bool:
            parents = app.find_parents()
            return not parents or self._observer.decide_state(app.ref, parents) in END_STATES

        return self._followed.setdefault(app_id, Pods(app, has_ended))

    def _cancel_existing(self, app_id: str) -> None:
        self._cancel(self._find(app_id), kube.BY_CANCEL)

    def _cancel(self, app: App, by: str) -> None:
        cancel(app, by, self._clock, _print_line)

    def ask_app(self, app_id: str, kind: AskKind, limit_s: float) -> Answer:
        """See `PluginScheduler`. Needs the right to `pods/exec`."""
        return agent_requests.ask_app(self._find(app_id), kind, limit_s)

    def stop_app(self, app_id: str, limit_s: float) -> Answer:
        """See `PluginScheduler`. Needs the right to `pods/exec`."""
        app = self._find(app_id)
        return agent_requests.stop_app(app, limit_s, lambda: self._cancel(app, kube.BY_STOP), self._clock)

    def open_in_node(self, app_id: str, role: str, index: int, words: Sequence[str]) -> NodePipe:
        """See `PluginScheduler`: `kubectl exec`. It needs the right to `pods/exec`."""
        return agent_requests.open_in_node(self._find(app_id), role, index, words)

    def end_node(self, app_id: str, role: str, index: int) -> bool:
        """See `PluginScheduler`. Needs the right to delete pods."""
        agent_requests.end_node(self._find(app_id), role, index)
        return True

    def delete_app(self, app_id: str) -> None:
        """Delete an app and everything that belongs to it."""
        self.delete_unfinished(app_id)

    def delete_unfinished(self, app_id: str) -> bool:
        """See `PluginScheduler`. Deletes only what has the labels of the app."""
        app = self._find(app_id)
        found = delete(app)
        forget_logs(app.ref)
        self._observer.forget(app.ref)
        return found

    def resize_app(self, app_id: str, nodes: int, role: str | None) -> Answer:
        """See `PluginScheduler` and `running_apps.app.resize`."""
        resize(self._find(app_id), nodes, role)
        return Answer(outcome=AskOutcome.DONE, line=f"{app_id} has {count_nodes(nodes)} from now on")

    def close(self) -> None:
        """Stop what is left of apps that have failed, then drops all connections. Idempotent."""
        super().close()
        for role_stop in self._role_stops:
            role_stop.close()
        self._role_stops.clear()
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._followed.clear()


def _build_name(app: AppDef, options: Options) -> str:
    labels = kube.label_roles([role.name for role in app.roles]) if app.roles else ["app"]
    nodes = max((role.num_replicas for role in app.roles), default=1)
    limit = kube.compute_app_limit(labels, options.flavor, nodes)
    return build_app_name(app.name, make_suffix(), reserve=kube.NAME_LIMIT - limit)


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


def _load_images() -> Any:
    """Return the module, which only `image_repo` loads."""
    from muster.schedulers.kubernetes import images

    return images


def _print_line(text: str) -> None:
    print_line(f"muster: {text}")
