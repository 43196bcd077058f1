"""Where the nodes of a run are: network namespaces, and a disk of its own. They need root. The journal undoes them."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from muster._shared.contract import Env
from muster.cli.rehearse.faults import NodeSetting, NotPossibleError
from muster.cli.rehearse.journal import Journal, Undo
from muster.schedulers.supervision.app_folder import AppSpec

ADDRESSES: Final = "10.77.0."
"""Node n has the address that ends with n + 1."""
_PORT: Final = "29400"
"""The port of rendezvous. The namespace is the run's own, and nothing else listens there."""
_DISK_BYTES: Final = 320 << 20


class Network:
    """A bridge, and a namespace for each node that is added.

    The bridge has a namespace of its own: a packet filter of this machine would drop packets.
    """

    def __init__(self, name: str, journal: Journal) -> None:
        """Make nothing before it is entered.

        Args:
            name: the beginning of all namespaces' names. Nothing else on this machine begins with it.
            journal: gets each namespace before it is made.
        """
        self.name = name
        self.bridge = f"{name}-b"
        self.spaces: list[str] = []
        """By node."""
        self._journal = journal
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Network":  # noqa: PYI034  # typing.Self is Python 3.11
        """Make the bridge.

        Raises:
            NotPossibleError: there are no namespaces here.
        """
        with contextlib.ExitStack() as undo:
            undo.push(self)
            self._add_space(self.bridge)
            run_tool("ip", "-n", self.bridge, "link", "add", "switch0", "type", "bridge")
            run_tool("ip", "-n", self.bridge, "link", "set", "switch0", "up")
            undo.pop_all()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def add_node(self) -> int:
        """Make the namespace of the next node, and return its number. Raises as `__enter__`."""
        node = len(self.spaces)
        space = f"{self.name}-{node}"
        self._add_space(space)
        self.spaces.append(space)
        peer = ("peer", "name", "eth0", "netns", space)
        run_tool("ip", "-n", self.bridge, "link", "add", f"v{node}", "type", "veth", *peer)
        run_tool("ip", "-n", self.bridge, "link", "set", f"v{node}", "master", "switch0", "up")
        run_tool("ip", "-n", space, "addr", "add", f"{ADDRESSES}{node + 1}/24", "dev", "eth0")
        for link in ("eth0", "lo"):
            run_tool("ip", "-n", space, "link", "set", link, "up")
        return node

    def set_link(self, node: int, state: str) -> None:
        """Set the link `up` or `down` at the bridge: the node loses its carrier. Raises as `__enter__`."""
        run_tool("ip", "-n", self.bridge, "link", "set", f"v{node}", state)

    def _add_space(self, space: str) -> None:
        self._stack.enter_context(self._journal.keep(Undo("namespace", (space,))))
        run_tool("ip", "netns", "add", space)


@dataclass(frozen=True, kw_only=True)
class World:
    """The world of one run."""

    folder: Path
    """On the run's disk."""
    network: Network | None = None
    """None: its nodes are in no namespaces."""

    def place(self, spec: AppSpec) -> AppSpec:
        """Put the nodes into their namespaces. Node 0 listens in its own: the supervisor's socket is outside."""
        if self.network is None:
            return spec
        names = {Env.RANK0_HOST: f"{ADDRESSES}1", Env.RDZV_PORT: _PORT}
        names |= {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
        env = ("env", "-u", Env.RDZV_FD, *(f"{name}={value}" for name, value in names.items()))
        ((role, plans),) = spec.details["replicas"].items()
        placed = [
            {**plan, "command": (find_tool("ip"), "netns", "exec", space, *env, *plan["command"])}
            for plan, space in zip(plans, self.network.spaces, strict=True)
        ]
        return replace(spec, details={**spec.details, "replicas": {role: placed}})

    @contextlib.contextmanager
    def cut(self, node: int) -> Iterator[None]:
        """See `Scene`."""
        if self.network is None:
            raise NotPossibleError("its nodes share the network of this machine")
        self.network.set_link(node, "down")
        try:
            yield
        finally:
            with contextlib.suppress(NotPossibleError):
                self.network.set_link(node, "up")


@contextlib.contextmanager
def make_world(setting: NodeSetting, folder: Path, *, nodes: int, journal: Journal) -> Iterator[World]:
    """Make the world of a run. What it is made of is gone at the end of the block.

    Args:
        setting: what the fault needs.
        folder: of the run.
        nodes: of the job.
        journal: gets each thing before it is made.

    Raises:
        NotPossibleError: it cannot be made here.
    """
    with contextlib.ExitStack() as stack:
        if setting is not NodeSetting.ORDINARY and os.geteuid() != 0:
            raise NotPossibleError("it needs root")
        if setting is NodeSetting.NETNS:
            network = stack.enter_context(Network(f"muster-rehearsal-{os.getpid()}", journal))
            for _ in range(nodes):
                network.add_node()
            yield World(folder=folder, network=network)
        elif setting in (NodeSetting.ORDINARY, NodeSetting.CGROUP):
            yield World(folder=folder)
        else:
            disk = folder / "disk"
            _make_disk(setting, disk, stack, journal)
            try:
                yield World(folder=disk)
            finally:
                if (disk / "logs").is_dir():
                    shutil.copytree(disk / "logs", folder / "logs", symlinks=True, ignore=_ignore_pipes)
                stack.close()
                disk.rmdir()


def _make_disk(setting: NodeSetting, disk: Path, stack: contextlib.ExitStack, journal: Journal) -> None:
    disk.mkdir(parents=True)
    if setting is NodeSetting.OWN_DISK:
        image = disk.with_suffix(".img")
        stack.callback(image.unlink, missing_ok=True)
        with image.open("wb") as file:
            file.truncate(_DISK_BYTES)
        run_tool("mkfs.ext4", "-q", "-F", str(image))
    stack.enter_context(journal.keep(Undo("unmount", (str(disk),))))
    if setting is NodeSetting.OWN_DISK:
        run_tool("mount", "-o", "loop", str(disk.with_suffix(".img")), str(disk))
    else:
        run_tool("mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "muster-rehearsal", str(disk))


def _ignore_pipes(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(folder, name).is_fifo()]


def find_tool(program: str) -> str:
    """Return the path of a program.

    Raises:
        NotPossibleError: there is none.
    """
    found = shutil.which(program)
    if found is None:
        raise NotPossibleError(f"it needs the program {program}")
    return found


def run_tool(program: str, *arguments: str) -> None:
    """Run a program to its end.

    Raises:
        NotPossibleError: there is none, or it failed. The message has its output.
    """
    command = (find_tool(program), *arguments)
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        why = " ".join(str(error.stderr).split())
        raise NotPossibleError(f"{' '.join((program, *arguments[:3]))} ...: {why}") from error
