"""The apps that the contract's tests submit: shell commands, and programs under muster's agent."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torchx.specs import AppDef, Resource, Role, macros
from torchx.specs.api import RetryPolicy

from muster.schedulers.adapter import RoleKey

ROLE: Final = "w"

WAITS: Final = "echo started; exec sleep 600"

COUNTS: Final = """\
import os, sys, time
from muster import worker

def say(*words):
    sys.stdout.write(" ".join(map(str, ("rank", os.environ["RANK"], *words))) + "\\n")
    sys.stdout.flush()

step = 0
while not worker.should_stop(step):
    if step == 1:  # it has asked by then
        say("of", os.environ["WORLD_SIZE"], "counts")
    if worker.should_checkpoint(step):
        say("saves at", step)
        worker.saved(step)
    worker.wait_while_paused()
    worker.step(step)
    time.sleep(0.02)
    step += 1
say("stops at", step)
"""
"""Counts steps until it is to stop. It saves and pauses when it is asked to.

The only worker of a node has the agent's console. With PYTHONUNBUFFERED, `print` writes the end of a line by itself,
and the agent's next line may come before it.
"""

FIND: Final = """\
import glob, os, sys

found = []
for path in glob.glob("/proc/[0-9]*"):
    try:
        words = open(path + "/cmdline", "rb").read()
        if "-".join(sys.argv[2:]).encode() in words and sys.argv[1].encode() in open(path + "/environ", "rb").read():
            found.append(words)
    except OSError:
        continue
print(found)
"""
"""Prints the processes of an app that have a word. It gets the app's id and the parts of the word."""

FAILS_TWICE: Final = """\
import os, sys, time

attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "attempt", attempt, flush=True)
if os.environ["RANK"] == "1":
    for number in range(50):
        print("line", number, "of attempt", attempt)
        print("warning", number, "of attempt", attempt, file=sys.stderr)
    sys.exit("the batch was bad")
time.sleep(600)
"""
"""The second of two ranks fails in every attempt. It writes each line in parts, to both streams."""


FAULTS: Final = """\
import os, signal, sys, time

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "attempt", attempt, flush=True)
if os.environ["RANK"] == "0":
    time.sleep(600)
time.sleep(0.5)  # the other rank has said its line by then
if attempt == 0:
    sys.exit(33)
if attempt in (1, 2):
    raise KeyError("no such key")
if attempt == 3:
    os.kill(os.getpid(), signal.SIGUSR2)
if attempt == 4:
    sys.exit(77)
raise MemoryError("no memory is left")
"""
"""The second of two ranks fails in each attempt, from another cause each time. `RULES` has what follows."""

RULES: Final = (
    "exit 32,33: restart free; LookupError: restart 2; signal USR2: restart; exit 77: elsewhere; oom: stop; any: stop"
)


SERVES: Final = """\
import os, socket, sys, time

print("server started", flush=True)
seen = {"helper": 0, "fails": 0}
with socket.create_server(("", int(os.environ["SERVED_PORT"]))) as server:
    while seen["helper"] < 3 or seen["fails"] < 2:
        client, _ = server.accept()
        word = client.recv(100).decode()
        if word:
            seen[word] += 1
        client.close()
    server.settimeout(0.2)
    until_s = time.monotonic() + 3.0  # the failure of the other role is known by then
    while time.monotonic() < until_s:
        try:
            server.accept()[0].close()
        except OSError:
            pass
print("served", *seen.values(), flush=True)
"""
"""Ends when the role `helper` has come three times, and the role `fails` twice."""

COMES: Final = """\
import os, socket, sys

host = os.environ["MUSTER_ROLE_W_HOSTS"].split(",")[0]
client = socket.create_connection((host, int(os.environ["MUSTER_ROLE_W_PORT_MEET"])), timeout=10)
client.sendall(sys.argv[1].encode())
client.recv(1)
sys.exit(int(sys.argv[2]))
"""
"""Sends a word to the role `w`, and ends with a code."""


STAYS: Final = """\
import os, signal, socket, sys, time

def end(signum, frame):
    print("told to end", flush=True)
    if sys.argv[1] == "ends":
        sys.exit(0)

signal.signal(signal.SIGTERM, end)
with socket.create_server(("", int(os.environ["SERVED_PORT"]))):
    while True:
        time.sleep(0.05)
"""
"""Listens. When it is told to end, it does so, or goes on."""


def build_roles(port: int, *, image: str = "") -> AppDef:
    """Build an app of three roles: a server, one that serves it and always comes back, and one that fails.

    Args:
        port: of the server.
        image: of all roles.
    """
    helper = {"restart": "always", "backoff_s": 0.2, "after": ROLE, "ends_with": ROLE, "grace_s": 4.0}
    fails = {"critical": False, "restart": "on-failure", "max_restarts": 1, "after": ROLE}
    return AppDef(
        name="contract",
        roles=[
            _build_program(ROLE, SERVES, image=image, port=port),
            _build_program("helper", COMES, "helper", "0", image=image, policy=helper),
            _build_program("fails", COMES, "fails", "3", image=image, policy=fails),
        ],
    )


def build_critical_role(ports: Sequence[int], *, image: str = "") -> AppDef:
    """Build an app whose last role fails once the others run: `w` ends when it is told to, `deaf` must be killed.

    Args:
        ports: of `w` and of `deaf`.
        image: of all roles.
    """
    return AppDef(
        name="contract",
        roles=[
            _build_program(ROLE, STAYS, "ends", image=image, port=ports[0]),
            _build_program(
                "deaf", STAYS, "goes on", image=image, port=ports[1], policy={"after": ROLE, "grace_s": 1.0}
            ),
            _build_program("fails", "raise SystemExit(3)", image=image, policy={"after": "deaf"}),
        ],
    )


def _build_program(
    name: str, program: str, *args: str, image: str, port: int | None = None, policy: Mapping[str, Any] | None = None
) -> Role:
    return Role(
        name=name,
        image=image,
        entrypoint="python3",
        args=["-c", program, *args],
        resource=_small(),
        port_map={} if port is None else {"meet": port},
        env={} if port is None else {"SERVED_PORT": str(port)},
        metadata={} if policy is None else {RoleKey.POLICY: policy},
    )


def build_shell(script: str, *, name: str = "contract", replicas: int = 1, image: str = "", retries: int = 0) -> AppDef:
    """Build an app of one role that runs a shell command without an agent.

    Args:
        script: of `sh -c`.
        name: the app's.
        replicas: how many.
        image: the role's.
        retries: how often a replica that fails is started again.
    """
    role = Role(
        name=ROLE,
        image=image,
        entrypoint="sh",
        args=["-c", script],
        num_replicas=replicas,
        max_retries=retries,
        retry_policy=RetryPolicy.REPLICA,
        resource=_small(),
    )
    return AppDef(name=name, roles=[role])


def build_agents(
    program: str,
    *,
    name: str = "contract",
    nodes: int = 2,
    least: int | None = None,
    image: str = "",
    retries: int = 0,
    restarts: int = 0,
    rules: str = "",
) -> AppDef:
    """Build an app of one role whose replicas run the agent, with one worker each.

    Args:
        program: Python source of the worker.
        name: the app's.
        nodes: how many.
        least: the fewest nodes with which the app can go on. None: all are needed.
        image: the role's.
        retries: how many lost replicas are replaced.
        restarts: how often all workers are started again when one has failed.
        rules: what follows from a failure, of `--on`.
    """
    size = str(nodes) if least is None else f"{least}:{nodes}"
    args = ["-m", "muster.agent", "--nnodes", size, "--nproc-per-node", "1", "--max-restarts", str(restarts)]
    args += ["--rank0-env", macros.rank0_env, "--node-rank", macros.replica_id, "--rdzv-id", macros.app_id]
    args += [f"--on={rules}", "--tee", "3"] if rules else []
    args += ["--start", "cold", "--shutdown-timeout", "4", "--no-python", "python3", "-c", program]
    role = Role(
        name=ROLE,
        image=image,
        entrypoint="python3",
        args=args,
        num_replicas=nodes,
        min_replicas=least,
        max_retries=retries,
        resource=_small(),
    )
    return AppDef(name=name, roles=[role])


def _small() -> Any:
    return Resource(cpu=1, gpu=0, memMB=128)
