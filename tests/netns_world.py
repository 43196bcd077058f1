"""Real agents, each in a network namespace of its own and below a subreaper: for tests of lost nodes and bad links.

with World(tmp_path) as world:
    one, two = world.start(2, "1:2")
    two.kill_agent()
    world.wait_for_sizes([2, 1], one)
    world.finish(one)
"""

import contextlib
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from harness import AGENT, PROGRAMS, Tree, skip_or_fail, wait_until
from launchers import ONE_START, SCALED

from muster.cli.rehearse.faults import NotPossibleError
from muster.cli.rehearse.journal import Journal
from muster.cli.rehearse.world import Network, run_tool

PROGRAM = PROGRAMS / "netns_sums.py"
HUB = Path(__file__).parent / "slow_hub.py"
SERIAL = itertools.count()


class Net(Network):
    """What tests do beside it to the network of the rehearsals."""

    def __init__(self, folder: Path) -> None:
        """Leave what is to be undone in a folder."""
        super().__init__(f"m{os.getpid()}-{next(SERIAL)}", Journal(folder / "journal"))
        self.hub: subprocess.Popen[str] | None = None

    def drop(self, index: int, chain: str) -> None:
        """Drop what reaches the node (`INPUT`) or what it sends (`OUTPUT`); the other direction stays open."""
        way = "-i" if chain == "INPUT" else "-o"
        self._filter(index, "-A", chain, way, "eth0", "-j", "DROP")

    def stop_dropping(self, index: int, chain: str) -> None:
        self._filter(index, "-F", chain)

    def name_two_addresses(self, name: str, index: int, silent: str) -> None:
        """Give the node a second address, which drops all packets, and let a name have both in all namespaces."""
        run_tool("ip", "-n", self.spaces[index], "addr", "add", f"{silent}/24", "dev", "eth0")
        self._filter(index, "-A", "INPUT", "-i", "eth0", "-d", silent, "-j", "DROP")
        for space in self.spaces:
            folder = Path("/etc/netns", space)  # `ip netns exec` mounts its files over those of /etc
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{silent} {name}\n10.77.0.{index + 1} {name}\n")

    def _filter(self, index: int, *words: str) -> None:
        run_tool("ip", "netns", "exec", self.spaces[index], "iptables", "--wait", *words)

    def delay(self, delay_ms: int) -> None:
        """Delay every packet of every node added so far: a slow hub replaces the bridge.

        Not tc's netem, which many kernels are built without. Links and filters of these nodes cannot be changed then.
        """
        if not os.path.exists("/dev/net/tun"):
            pytest.skip("latency is not available: this kernel has no TAP devices (/dev/net/tun)")
        for space in self.spaces:
            run_tool("ip", "-n", space, "link", "del", "eth0")
        places = [f"{space}=10.77.0.{index + 1}/24" for index, space in enumerate(self.spaces)]
        command = [sys.executable, "-I", "-S", str(HUB), str(delay_ms), *places]
        self.hub = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.hub.stdout.readline() == "ready\n"

    def __exit__(self, *exc: object) -> None:
        if self.hub is not None:
            self.hub.kill()
            self.hub.communicate()
        super().__exit__(*exc)
        for space in self.spaces:
            shutil.rmtree(Path("/etc/netns", space), ignore_errors=True)


class Node:
    """One node's agent."""

    def __init__(
        self, space: str, index: int, command: list[str], folder: Path, number: int, more: Mapping[str, str]
    ) -> None:
        self.index = index
        self.log_dir = folder / f"logs{number}"
        env = {
            **os.environ,
            **more,
            "PYTHONWARNINGS": "ignore",
            "GLOO_SOCKET_IFNAME": "eth0",
            "MUSTER_TOKEN": "0123456789abcdef" * 2,
            "PYTHONUNBUFFERED": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # the program's own sums are at MASTER_PORT
        }
        flags = ["--node-rank", str(index), "--log-dir", str(self.log_dir)]
        agent = [*AGENT, *flags, *command]
        # `ip netns exec` replaces itself with the command: the tree's first process is the agent's guard.
        self.tree = Tree(["ip", "netns", "exec", space, *agent], env=env, cwd=folder)

    def find_agent(self) -> int:
        """The process below the guard."""
        return self.tree.children()[0]

    def find_workers(self) -> list[int]:
        """Processes that run the program, warm or cold."""
        found = []
        for pid in self.tree.descendants():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                is_other = b"muster.agent" in command or command[0] == b"muster-template"
                is_worker = str(PROGRAM).encode() in command and not is_other
                if is_worker or self._is_forked(pid):
                    found.append(pid)
        return found

    def _is_forked(self, pid: int) -> bool:
        """A warm worker has the template's command line; only a worker has a mark open."""
        links = Path(f"/proc/{pid}/fd").iterdir()
        return any(os.readlink(link).endswith(".mark") for link in links)

    def kill_agent(self) -> None:
        """SIGKILL the agent alone: the guard cleans up, so that nothing of the node is left."""
        self.tree.kill_agent()

    def read_events(self) -> str:
        """Its event records so far, as the file has them."""
        return "".join(path.read_text() for path in self.log_dir.rglob("events.jsonl"))

    def world_sizes(self) -> list[int]:
        """Sizes of the worlds it summed over, in order, repeats dropped; a wrong sum fails."""
        sizes: list[int] = []
        for got, size in re.findall(r"sum (\d+) of (\d+)", self.tree.stdout):
            assert got == size, self.tree.stdout
            if not sizes or sizes[-1] != int(size):
                sizes.append(int(size))
        return sizes

    def explain(self) -> str:
        """Its output, without the sums."""
        lines = [line for line in self.tree.stdout.splitlines() if not re.search(r"sum \d", line)]
        sizes = [size for _, size in re.findall(r"sum (\d+) of (\d+)", self.tree.stdout)]
        worlds = " ".join(f"{size}x{len(list(steps))}" for size, steps in itertools.groupby(sizes))
        return f"== node {self.index}: {worlds}\n" + "\n".join([*lines, self.tree.stderr])[-3000:]


class World:
    """Nodes in namespaces, all running `programs/netns_sums.py`; a context manager that leaves nothing behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.net = Net(folder)
        self.env = SCALED
        """What agents get beside this process's environment."""
        self.nodes: list[Node] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "World":  # noqa: PYI034 - typing.Self is Python 3.11, and there is no subclass
        has_tools = shutil.which("ip") and shutil.which("iptables")
        reason = None if os.geteuid() == 0 and has_tools else "network namespaces need root, iproute2 and iptables"
        if reason is None:
            try:
                self._stack.enter_context(self.net)
            except NotPossibleError as error:
                reason = f"no network namespaces here: {error}"
        if reason is not None:
            self._stack.close()
            skip_or_fail("netns", reason)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def launch(
        self,
        index: int,
        nnodes: str,
        *,
        sums: str = "gloo",
        conf: str = "",
        program: tuple[str, ...] = (),
        **flags: str,
    ) -> Node:
        """Start the agent of one node; `flags` override the defaults, `program` is a script and its words."""
        while len(self.net.spaces) <= index:
            self.net.add_node()
        settings = ",".join(filter(None, ["join_timeout=80,last_call_timeout=1", conf]))
        given = {
            "nnodes": nnodes,
            "nproc-per-node": "1",
            "rdzv-backend": "c10d",
            "rdzv-id": self.net.name,
            "rdzv-endpoint": "10.77.0.1:29400",
            "rdzv-conf": settings,
            "tee": "3",
            "start": ONE_START or ("warm" if sums == "gloo" else "cold"),
            **flags,
        }
        words = [word for name, value in given.items() for word in (f"--{name}", value)]
        command = [*words, *(program or (str(PROGRAM), sums, str(self.folder)))]
        node = Node(self.net.spaces[index], index, command, self.folder, len(self.nodes), self.env)
        self.nodes.append(self._stack.enter_context(_closing(node)))
        return node

    def start(self, count: int, nnodes: str, **options: str) -> list[Node]:
        """Start nodes 0 to count - 1 and wait until all train together."""
        nodes = [self.launch(index, nnodes, **options) for index in range(count)]
        self.wait_for(lambda: all(node.world_sizes()[-1:] == [count] for node in nodes), f"all {count} train")
        return nodes

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Wait until the condition holds; the error contains the output of all nodes."""
        try:
            wait_until(condition, what=what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n" + "\n".join(node.explain() for node in self.nodes)) from None

    def wait_for_sizes(self, sizes: list[int], *nodes: Node) -> None:
        """Wait until these nodes have trained in worlds of these sizes last."""
        count = len(sizes)
        self.wait_for(lambda: all(node.world_sizes()[-count:] == sizes for node in nodes), f"worlds of {sizes}")

    def finish(self, *nodes: Node) -> None:
        """Let the job end: all exit 0, nothing is left behind, and no two groups were alive at the same time."""
        (self.folder / "stop").touch()
        for node in nodes:
            outcome = node.tree.wait()
            output = "\n".join(each.explain() for each in self.nodes)
            assert (outcome.exit_code, outcome.leftovers) == (0, ()), f"{outcome.leftovers}\n{output}"
        overlaps = self.folder / "overlaps"
        assert not overlaps.exists(), overlaps.read_text() + "\n".join(node.explain() for node in self.nodes)


@contextlib.contextmanager
def _closing(node: Node):
    with node.tree:
        yield node
