"""A kubelet for the double of the API server: the containers of its pods are processes of this machine.

Pods get their files, variables, signals and logs as from a real one. They share this machine's network, so node 0 is
on the loopback, each Job with a port of its own.
"""

import base64
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from harness import LIMIT_S, find_free_port

GRACE_S = 30.0


class Kubelet:
    """Runs every pod of a `kubernetes_api.Cluster`; use `run_kubelet`."""

    def __init__(self, cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.begin_s = time.monotonic()
        self.running = {}
        self.threads = []
        self.ports = {}
        cluster.grace = self.stop
        cluster.run_command = self.execute
        cluster.start_command = self.begin

    def watch(self) -> None:
        """Start pods that are pending, and stop those that are gone, until the server closes."""
        while not self.cluster.closing:
            with self.cluster.lock:
                pods = {pod["metadata"]["name"]: pod for pod in self.cluster.find("pods")}
                new = [pod for pod in pods.values() if pod["status"]["phase"] == "Pending"]
                gone = [name for name in self.running if name not in pods]
                if not new and not gone:
                    self.cluster.lock.wait(0.05)
                    continue
                for pod in new:
                    if "deletionTimestamp" not in pod["metadata"]:
                        self.cluster.start_pod(pod)
            for pod in new:
                self.start(pod)
            for name in gone:
                if (process := self.running.pop(name, None)) is not None:  # it may have ended since
                    self.end(process, signal.SIGTERM)

    def start(self, pod) -> None:
        container = pod["spec"]["containers"][0]
        home = self.folder / pod["metadata"]["name"]
        (home / "opt").mkdir(parents=True)
        for volume in pod["spec"].get("volumes", ()):
            for source in volume.get("projected", {}).get("sources", ()):
                plural = "configmaps" if "configMap" in source else "secrets"
                named = self.find(pod, plural, (source.get("configMap") or source["secret"])["name"])
                for name, content in (named.get("binaryData") or named["data"]).items():
                    (home / "opt" / name).write_bytes(base64.b64decode(content))
        for mount in container.get("volumeMounts", ()):
            if mount["mountPath"].startswith("/muster/"):
                os.makedirs(self.place(mount["mountPath"], home), exist_ok=True)
        env = self.build_env(pod, container, home)
        command = [self.expand(self.place(word, home), env) for word in (*container["command"], *container["args"])]
        process = subprocess.Popen(
            [sys.executable if command[0] == "python3" else command[0], *command[1:]],
            env=env,
            cwd=self.place(container.get("workingDir", str(home)), home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.running[pod["metadata"]["name"]] = process
        thread = threading.Thread(target=self.follow, args=(pod, process, home), daemon=True)
        thread.start()
        self.threads.append(thread)

    def follow(self, pod, process, home) -> None:
        for line in process.stdout:
            passed_s = time.monotonic() - self.begin_s
            text = line.decode(errors="replace")
            self.cluster.write_log(pod, text, second=int(passed_s), nanos=int(passed_s % 1 * 1e9))
        process.stdout.close()
        code = process.wait()
        log = home / "termination-log"
        message = log.read_text() if log.exists() else ""
        with self.cluster.lock:
            key = ("/api/v1", pod["metadata"]["namespace"], "pods", pod["metadata"]["name"])
            self.running.pop(pod["metadata"]["name"], None)
            now = self.cluster.objects.get(key)
            if now is not None and "deletionTimestamp" not in now["metadata"]:  # else it goes, and is not replaced
                self.cluster.end_pod(pod, code if code >= 0 else 128 - code, message)

    def stop(self, pod) -> None:
        """A pod that is being deleted gets SIGTERM, and may write until it ends."""
        process = self.running.get(pod["metadata"]["name"])
        if process is not None:
            self.end(process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(min(GRACE_S, pod["spec"].get("terminationGracePeriodSeconds", GRACE_S)))
            self.end(process, signal.SIGKILL)

    def kill(self, pod) -> None:
        """All processes of a pod end at once."""
        self.end(self.running[pod["metadata"]["name"]], signal.SIGKILL)

    @staticmethod
    def end(process, signum) -> None:
        with suppress(ProcessLookupError):
            if signum == signal.SIGKILL:
                os.killpg(process.pid, signum)
            else:
                process.send_signal(signum)

    def execute(self, pod, command):
        """`pods/exec`."""
        process = self.begin(pod, command)
        output, errors = process.communicate(timeout=LIMIT_S)
        return process.returncode, output, errors

    def begin(self, pod, command):
        """`pods/exec` with an input."""
        container = pod["spec"]["containers"][0]
        home = self.folder / pod["metadata"]["name"]
        words = [self.place(word, home) for word in command]
        env = self.build_env(pod, container, home)
        program = sys.executable if words[0] == "python3" else words[0]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([program, *words[1:]], env=env, **pipes)

    def find(self, pod, plural, name):
        with self.cluster.lock:
            return self.cluster.objects[("/api/v1", pod["metadata"]["namespace"], plural, name)]

    @staticmethod
    def place(text, home):
        """Replace the paths of a pod by those of this machine."""
        text = re.sub("/opt/muster(?=/|$)", f"{home}/opt", text)
        text = re.sub(r"(?<![\w.-])/muster/", f"{home}/muster/", text)  # not a folder of a volume, as /runs/muster/
        return text.replace("/dev/termination-log", f"{home}/termination-log")

    def build_env(self, pod, container, home):
        metadata = pod["metadata"]
        env = {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
        for item in container.get("env", ()):
            if "value" in item:
                env[item["name"]] = self.expand(self.place(item["value"], home), env)
            elif "secretKeyRef" in item["valueFrom"]:
                key = item["valueFrom"]["secretKeyRef"]
                secret = self.find(pod, "secrets", key["name"])
                env[item["name"]] = base64.b64decode(secret["data"][key["key"]]).decode()
            else:
                path = item["valueFrom"]["fieldRef"]["fieldPath"]
                label = re.fullmatch(r"metadata\.labels\['(.*)'\]", path)
                note = re.fullmatch(r"metadata\.annotations\['(.*)'\]", path)
                if path == "spec.nodeName":
                    env[item["name"]] = pod["spec"].get("nodeName", "node-a")  # the kubelet's own
                elif note:
                    env[item["name"]] = metadata.get("annotations", {}).get(note[1], "")
                else:
                    env[item["name"]] = metadata["labels"][label[1]] if label else metadata[path.partition(".")[2]]
        env |= {name: "127.0.0.1" for name in env if re.fullmatch("MUSTER_ROLE_.*_HOSTS", name)}
        port = self.ports.setdefault(metadata["ownerReferences"][0]["name"], find_free_port())
        return env | {
            "TORCHX_RANK0_HOST": "127.0.0.1",
            "MUSTER_RDZV_PORT": str(port),
            "MUSTER_LAST_CALL_S": "1",  # these pods start at once
        }

    @staticmethod
    def expand(text, env):
        """Kubernetes' own rules for $(NAME) and $$."""
        return re.sub(
            r"\$\$|\$\((\w+)\)",
            lambda found: "$" if found[0] == "$$" else env.get(found[1], found[0]),
            text,
        )

    def close(self) -> None:
        for process in list(self.running.values()):
            self.end(process, signal.SIGKILL)
        for thread in self.threads:
            thread.join(10)


@contextmanager
def run_kubelet(cluster, folder: Path):
    """Run the pods of a cluster until the end of the block."""
    kubelet = Kubelet(cluster, folder)
    watcher = threading.Thread(target=kubelet.watch, daemon=True)
    watcher.start()
    try:
        yield kubelet
    finally:
        cluster.closing = True
        watcher.join(10)
        kubelet.close()
