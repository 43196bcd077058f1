"""Makes 19df633/docker: six jobs on a real engine (image muster-test:torch), and what the engine says of them.

env -i PATH="$PATH" flock /tmp/docker.lock .venv/bin/python tests/golden/makers/make_docker.py
"""

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from snapshot import DATA, GOLDEN, Marks, save_tree

STATE = Path(tempfile.mkdtemp(prefix="golden-state-"))
os.environ.clear()
os.environ |= {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/home/golden", "XDG_STATE_HOME": str(STATE)}

import docker  # noqa: E402
from torchx.runner import Runner  # noqa: E402
from torchx.specs import AppDef, Resource, RetryPolicy, Role  # noqa: E402
from torchx.specs.api import macros  # noqa: E402

from muster.schedulers.docker import create_detached_scheduler  # noqa: E402

IMAGE = "muster-test:torch"
FREE = Resource(cpu=-1, gpu=0, memMB=0)
USER = f"{os.geteuid()}@{socket.gethostname()}"


def train(*words: str, nodes: int = 2, **more: Any) -> Role:
    """Nodes of one worker each."""
    args = ["-m", "muster.agent", "--nnodes", str(nodes), "--nproc-per-node", "1", "--rank0-env", macros.rank0_env]
    args += ["--node-rank", macros.replica_id, "--rdzv-id", macros.app_id, "--start", "cold", *words]
    env = {"LR": "0.1", "HF_TOKEN": "fake-token-of-the-role"}
    fields = {"name": "trainer", "image": IMAGE, "entrypoint": "python3", "args": args, "env": env}
    return Role(**(fields | {"num_replicas": nodes, "resource": FREE, "max_retries": 2} | more))


def shell(script: str, **more: Any) -> Role:
    fields = {"name": "side", "image": IMAGE, "entrypoint": "sh", "args": ["-c", script], "resource": FREE}
    return Role(**(fields | more))


def reduce_container(data: dict[str, Any]) -> dict[str, Any]:
    """What is read of a container, and what another one like it is made of."""
    config, host, networks = data["Config"], data["HostConfig"], data["NetworkSettings"]["Networks"]
    state = ("Status", "Running", "ExitCode", "OOMKilled", "Error", "StartedAt", "FinishedAt")
    return {
        "Id": data["Id"],
        "Name": data["Name"],
        "State": {key: data["State"][key] for key in state},
        "Config": {key: config[key] for key in ("Image", "Hostname", "Cmd", "Entrypoint", "WorkingDir", "Labels")},
        "HostConfig": {key: host[key] for key in ("NetworkMode", "ReadonlyRootfs", "Init", "Memory", "DeviceRequests")},
        "Mounts": [{key: mount.get(key) for key in ("Type", "Name", "Destination", "RW")} for mount in data["Mounts"]],
        "Aliases": {name: network["Aliases"] for name, network in networks.items()},
    }


def read_engine(client: Any, apps: dict[str, str]) -> dict[str, Any]:
    """Containers, networks and volumes of the apps."""
    found: dict[str, Any] = {"containers": [], "networks": [], "volumes": []}
    for app_id in apps.values():
        label = {"label": f"io.muster.app={app_id}"}
        found = client.containers.list(all=True, filters=label, ignore_removed=True)
        containers = [client.api.inspect_container(each.id) for each in found]
        found["containers"] += [reduce_container(data) for data in sorted(containers, key=lambda data: data["Name"])]
        networks = [client.api.inspect_network(network.id) for network in client.networks.list(filters=label)]
        found["networks"] += [{key: data[key] for key in ("Name", "Driver", "Labels")} for data in networks]
        volumes = client.api.volumes(filters=label)["Volumes"] or []
        found["volumes"] += [{key: data[key] for key in ("Name", "Driver", "Labels")} for data in volumes]
    return found


def main() -> None:
    client = docker.from_env(timeout=60)
    runner = Runner("torchx", {"docker": create_detached_scheduler})
    scheduler = runner._scheduler("docker")
    workspace = Path(tempfile.mkdtemp(prefix="golden-work-"))
    os.utime(shutil.copy(GOLDEN / "train.py", workspace), (1.7e9, 1.7e9))  # it is part of the bundle's name
    apps: dict[str, str] = {}

    def run(name: str, *roles: Role, workspace: str | None = None, **cfg: Any) -> None:
        app = AppDef(name, roles=list(roles), metadata={"team": "vision"})
        apps[name] = runner.run(app, "docker", cfg=cfg, workspace=workspace).rsplit("/", 1)[1]

    def wait(holds: Any, limit_s: float = 120) -> None:
        until_s = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < until_s, {name: scheduler.describe(app_id) for name, app_id in apps.items()}
            time.sleep(0.1)

    def has_ended(name: str) -> bool:
        return scheduler.describe(apps[name]).state.name in ("SUCCEEDED", "FAILED", "CANCELLED")

    def log(name: str, role: str, k: int = 0) -> str:
        return "".join(scheduler.log_iter(apps[name], role, k))

    run("succeeded", train("train.py", "done"), workspace=str(workspace))
    run("failed", train("train.py", "raise", max_retries=0), workspace=str(workspace))
    run("cancelled", shell("echo working; while :; do sleep 1; done"), grace_s=1.0)
    wait(lambda: "working" in log("cancelled", "side"))
    scheduler.cancel(apps["cancelled"])
    wait(lambda: all(has_ended(name) for name in apps))
    side = shell("echo beside; exec sleep 1000", max_retries=1, retry_policy=RetryPolicy.REPLICA)
    run("running", train("train.py", "wait"), side, workspace=str(workspace))
    run("hostnet", train("train.py", "wait", nodes=1), workspace=str(workspace), network="host")
    run("readonly", train("--no-python", "sleep", "1000", nodes=1), read_only=True)
    wait(lambda: all("wait" in log("running", "trainer", k) for k in (0, 1)) and "beside" in log("running", "side"))
    wait(lambda: "wait" in log("hostnet", "trainer"))

    marks = Marks(STATE=str(STATE), PYTHON=sys.executable, MUSTER=str(GOLDEN.parents[1]), USER=USER)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for text, mark in ((socket.gethostname(), "@HOST@"), (boot, "@BOOT@")):
        marks.add(text, mark)
    for name, app_id in apps.items():
        marks.add(app_id, f"{name}-golden")
        private = STATE / "muster/docker-apps" / app_id / "private.json"
        if private.exists():
            containers = json.loads(private.read_text())["request"]["containers"]
            for token in {each["env"].get("MUSTER_TOKEN") for each in containers} - {None}:
                marks.add(token, "fake-rendezvous-token-of-an-app")
    target = DATA / "docker"
    shutil.rmtree(target, ignore_errors=True)
    engine = marks.apply(json.dumps(read_engine(client, apps), indent=1))
    shutil.move(STATE / "muster" / "docker-images", STATE.with_suffix(".images"))  # a cache, and of this engine
    save_tree(STATE, target, marks, leave_out=("muster-agent.zip",))
    (target / "engine.json").write_text(engine + "\n")
    for app_id in apps.values():
        scheduler.cancel(app_id)
    wait(lambda: all(has_ended(name) for name in apps))
    for app_id in apps.values():
        scheduler.delete(app_id)
    runner.close()
    shutil.rmtree(STATE.with_suffix(".images"))
    shutil.rmtree(STATE)
    shutil.rmtree(workspace)


if __name__ == "__main__":
    main()
