"""The supervisor's `ReplicaDriver` of ssh: for each replica a link, a process here that stands for it."""

import contextlib
import json
import posixpath
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from muster._shared.contract import AGENT_BUNDLE_NAME, Env, ExitCode
from muster.schedulers.naming import build_role_labels
from muster.schedulers.processes.driver import Launch
from muster.schedulers.processes.link_driver import LinkDriver
from muster.schedulers.ssh.command import build_ssh
from muster.schedulers.ssh.hosts import Discovery
from muster.schedulers.supervision.app_folder import AppSpec
from muster.schedulers.supervision.decisions import ResizeRequested
from muster.schedulers.supervision.driver import EventQueue, Handle, take_lent_fds
from muster.schedulers.supervision.state import AppPhase, ReplicaId
from muster.schedulers.wording.reasons import Code, Reason, Reasons

_ROLES: Final = "roles.json"
_WRITE: Final = """import os, sys
path = sys.argv[1]
open(path + ".new", "w").write(sys.stdin.read())
os.replace(path + ".new", path)
"""
_WRITE_S: Final = 20.0
RUN: Final = "{run}"
"""In commands and variables of `request`: the run folder of this start of the replica."""


def find_workspace_name(role: str) -> str:
    """Return the packed workspace of a role in the app's state folder."""
    return f"workspace-{role.encode().hex()}.tar"


class SshDriver(LinkDriver):
    """Starts links, and decides on which host each replica runs.

    A replica whose host is lost, or whose agent has left it with 69, starts again on a spare, if there is one. That
    host is then the last spare.
    """

    LISTENS = False

    def __init__(self, *, spec: AppSpec, event_queue: EventQueue) -> None:
        super().__init__(spec=spec, event_queue=event_queue)
        replicas = [ReplicaId(role.name, index) for role in spec.roles for index in range(role.replicas)]
        hosts = list(spec.details["hosts"])
        self._hosts = dict(zip(replicas, hosts, strict=False))
        self._first = {each.role: host for each, host in self._hosts.items() if each.index == 0}
        """The host whose address the plans have."""
        self._spares = hosts[len(replicas) :]
        self._discovery: Discovery | None = None
        discover = spec.details.get("discover")
        if discover:
            self._begin_discovery(discover)
        self._labels = build_role_labels([role.name for role in spec.roles])
        self._writing = threading.Lock()
        self._lent = take_lent_fds()
        """By host."""

    def build_launch(self, replica: ReplicaId, start_number: int) -> Launch:
        """See `ProcessDriver`."""
        return self._build_link(replica, start_number, "start")

    def start(self, replica: ReplicaId, start_number: int) -> Handle:
        """See `ReplicaDriver`."""
        handle = super().start(replica, start_number)
        run = self._find_run(replica, start_number)
        return {**handle, "host": self._hosts[replica], "start": start_number, "run": run}

    def _find_run(self, replica: ReplicaId, start_number: int) -> str:
        """Return the run folder on the host for one start of a replica."""
        label = self._labels[replica.role]
        return posixpath.join(self.spec.details["ssh"]["parent"], f"{label}-{replica.index}-{start_number}")

    def adopt(self, replica: ReplicaId, handle: Handle) -> bool:
        """See `ReplicaDriver`. A replica that stays gets another link, which goes on where the earlier one ended."""
        if not self.spec.details["ssh"]["stays"]:
            return super().adopt(replica, handle)
        host = handle["host"]
        if host in self._spares:
            self._spares[self._spares.index(host)] = self._hosts[replica]
        self._hosts[replica] = host
        self.launch(replica, lambda: self._build_link(replica, handle["start"], "attach"))
        return True

    def suspend(self, *, suspended: bool) -> None:
        """See `ReplicaDriver`. Replicas on other machines go on: their agents would take each other for lost."""

    def explain_end(self, replica: ReplicaId, code: int) -> tuple[int | None, Reasons]:
        """See `ProcessDriver`. The host of a replica that is lost, or has left it, is then the last spare."""
        left = code == ExitCode.RENDEZVOUS and self.runs_agent(replica)
        known, reasons = super().explain_end(replica, code)
        if not (left or known is None) or not self._spares or not self._starts_again(replica):
            return known, reasons
        self._move(replica, self._spares.pop(0))
        return known, (*reasons, Reason(code=Code.MOVED, host=self._hosts[replica]))

    def _starts_again(self, replica: ReplicaId) -> bool:
        """Return whether a lost replica has a retry left.

        Without one its host stays its own: the others need that address.
        """
        record = self.folder.read_record()
        role = next(each for each in self.spec.roles if each.name == replica.role)
        if record is None or record.app.phase is AppPhase.ENDING:
            return False
        used = record.app.replicas[replica].restarts
        restarts = role.policy.restarts(None, used, runs_agent=role.runs_agent)
        return restarts or record.app.retries.get(role.name, 0) < role.max_retries

    def _move(self, replica: ReplicaId, host: str) -> None:
        """Let a replica start on another host next time. Its own is the last spare then.

        Agents that have lost their first host find the next one only by its address: they start again with it.
        """
        self._spares.append(self._hosts[replica])
        self._hosts[replica] = host
        if len(self.spec.roles) > 1:
            threading.Thread(target=self._write_hosts, daemon=True).start()
        if replica.index == 0 and self.runs_agent(replica):
            for other in self._hosts:
                if other.role == replica.role and other != replica:
                    self.stop(other)

    def _write_hosts(self) -> None:
        """Write where the roles are now beside what runs. A host that cannot be reached is about to be lost itself."""
        record, ssh = self.folder.read_record(), self.spec.details["ssh"]
        for handle in () if record is None else record.handles.values():
            command = build_ssh(ssh["ssh"], handle["host"], ssh["python"], ["-c", _WRITE, f"{handle['run']}/{_ROLES}"])
            with self._writing, contextlib.suppress(OSError, subprocess.SubprocessError):
                text = json.dumps(self.find_hosts())  # also of a later move
                subprocess.run(command, input=text, text=True, capture_output=True, timeout=_WRITE_S, check=False)

    # -- hosts that appear and vanish -----------------------------------------------------------------------------

    def _begin_discovery(self, discover: Mapping[str, Any]) -> None:
        """Follow a discovery script: the app has as many nodes as there are hosts, within its bounds."""
        self._discovery = Discovery(discover["script"], discover["processes"])
        self._kept_spares = int(discover["spares"])
        self._event_queue.watch_readable(self._discovery.wake_fd, self._follow_discovery)
        if self.folder.read_record() is None and len(self._hosts) < self.spec.roles[0].replicas:
            self._resize()

    def _follow_discovery(self) -> None:
        assert self._discovery is not None  # noqa: S101  # it has called
        found = self._discovery.take()
        used = set(self._hosts.values())
        self._spares = [each for each in self._spares if each in found]
        self._spares += [each for each in found if each not in used and each not in self._spares]
        for replica in [each for each, host in self._hosts.items() if host not in found]:
            if replica in self._hosts:
                self._leave_host(replica)
        role = self.spec.roles[0]
        before = len(self._hosts)
        while len(self._spares) > self._kept_spares and len(self._hosts) < role.replicas:
            self._hosts[ReplicaId(role.name, len(self._hosts))] = self._spares.pop(0)
        if len(self._hosts) > before:
            self._resize()

    def _leave_host(self, replica: ReplicaId) -> None:
        """Move a replica whose host has vanished by a drain, to a spare, or to the last replica's host, which ends."""
        role = self.spec.roles[0]
        if self._spares:
            self._move(replica, self._spares.pop(0))
            self._spares.pop()  # the host that has vanished
            self.stop(replica)
            return
        if len(self._hosts) <= role.needed:
            return  # the fewest hosts allowed
        last = ReplicaId(role.name, len(self._hosts) - 1)
        host = self._hosts.pop(last)
        if replica != last:
            self._move(replica, host)
            self._spares.pop()
            self.stop(replica)
        self._resize()

    def _resize(self) -> None:
        self._event_queue.post(ResizeRequested(role=self.spec.roles[0].name, replicas=len(self._hosts)))

    def _find_address(self, host: str) -> str:
        """Return the address of a host. If it was not there at the submission, only its name is known."""
        addresses: Mapping[str, str] = self.spec.details["addresses"]
        return addresses.get(host, host.rpartition("@")[2])

    def find_hosts(self) -> Mapping[str, Sequence[str]]:
        """See `ProcessDriver`: where they are now."""
        hosts: dict[str, list[str]] = {role.name: [] for role in self.spec.roles}
        for each, host in sorted(self._hosts.items()):
            hosts[each.role].append(self._find_address(host))
        return hosts

    def _build_link(self, replica: ReplicaId, start_number: int, verb: str) -> Launch:
        plan: Mapping[str, Any] = self.spec.details["replicas"][replica.role][replica.index]
        ssh: Mapping[str, Any] = self.spec.details["ssh"]
        host = self._hosts[replica]
        run = self._find_run(replica, start_number)
        env = {**self.build_env(plan, replica, start_number), Env.NODE_NAME: host}
        if len(self.spec.roles) > 1:
            env[Env.ROLES_FILE] = f"{RUN}/{_ROLES}"
        first = ReplicaId(replica.role, 0)
        if self.runs_agent(replica) and self._hosts[first] != self._first[replica.role]:
            env[Env.RANK0_HOST] = self._find_address(self._hosts[first])
        files = [(AGENT_BUNDLE_NAME, str(self.folder.state_dir / AGENT_BUNDLE_NAME))]
        workspace = self.folder.state_dir / find_workspace_name(replica.role)
        if workspace.exists():
            files.append(("workspace.tar", str(workspace)))
        common = {"lost_s": ssh["lost_s"], "grace_s": self.spec.find_grace_s(replica.role), "stays": ssh["stays"]}
        lent = self._lent.pop(host, [])
        order = {
            **common,
            "verb": verb,
            "host": host,
            "fds": lent,
            "ssh": ssh["ssh"],
            "python": ssh["python"],
            "files": files,
            "node": {
                **common,
                "run": run,
                "command": [word.replace(RUN, run) for word in plan["command"]],
                "env": {name: value.replace(RUN, run) for name, value in env.items()},
                "runs_agent": self.runs_agent(replica),
            },
        }
        # -S: searching packages takes as long as Python's start.
        return self.build_link(replica, "muster.schedulers.ssh.link", order, flags=["-S"], lent=lent)
