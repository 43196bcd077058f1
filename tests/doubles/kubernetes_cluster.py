"""A model of the API server: the rules that our requests can break, and failures on demand. No sockets, no threads.

Strict validation, the rules of `kubernetes_rules.py`, conflicts, merge patches, garbage collection by owner, paging
with tokens that expire, log streams that break, bearer tokens that expire, injected
faults; and a Job controller with the rules by which the real one creates, replaces and deletes pods. Tests act as the
kubelet: they start and end pods.

`respond` answers a request. `kubernetes_memory.py` connects the client library to it, `kubernetes_api.py` serves it
over HTTP.
"""

import base64
import hashlib
import json
import pickle
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from doubles.kubernetes_rules import Broken, check_create, check_update
from doubles.kubernetes_schemas import Unknown, judge

WEBSOCKET_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455
PATH = re.compile(
    r"^(?P<group>/api/v1|/apis/[^/]+/[^/]+)(/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)(/(?P<name>[^/]+))?(/(?P<sub>log|exec))?$"
)
KINDS = {"jobs": "Job", "pods": "Pod", "services": "Service", "configmaps": "ConfigMap", "secrets": "Secret"}
KINDS |= {
    "jobsets": "JobSet",
    "podgroups": "PodGroup",
    "podmonitors": "PodMonitor",
    "events": "Event",
    "localqueues": "LocalQueue",
    "workloads": "Workload",
}
INDEX = "batch.kubernetes.io/job-completion-index"
INDEX_FAILURES = "batch.kubernetes.io/job-index-failure-count"
INDEX_IGNORED = "batch.kubernetes.io/job-index-ignored-failure-count"


@dataclass
class Fault:
    """A failure of the next request that matches.

    `method` "" is any. `status` 0 drops the connection. `after`: the request is carried out, only its response is lost.
    """

    method: str
    path: str
    status: int
    message: str = "injected"
    reason: str = ""
    headers: dict = field(default_factory=dict)
    after: bool = False
    times: int = 1


class Refusal(Exception):
    def __init__(self, status, message, reason=""):
        super().__init__(message)
        self.status, self.message, self.reason = status, message, reason


def duplicate(item):
    """As `copy.deepcopy`, and much faster."""
    return pickle.loads(pickle.dumps(item))


class Cluster:
    """The state of the server. Every method acquires the lock; tests may call all of them."""

    def __init__(self, version=("1", "36")):
        self.version = version
        self.lock = threading.Condition()
        self.objects = {}
        self.number = 100
        self.faults = []
        self.requests = []
        self.token = "one"
        self.allowed = None  # or the rights of an account, {"jobs.batch": {"get", "list"}, "pods/log": {"get"}}
        self.groups = {"batch": ["v1"]}
        self.kinds = {"batch/v1": ["jobs"]}
        self.logs = {}
        self.breaks = {}
        self.commands = []  # (pod, container, command) of every exec
        self.dead_nodes = set()  # names of nodes whose kubelet cannot be reached
        self.hanging_nodes = set()  # names of nodes whose kubelet accepts connections, and does not answer
        self.dead_containers = set()  # names of pods whose phase is still Running
        self.run_command = lambda pod, command: (
            0,
            b"",
            b"",
        )  # -> exit code, stdout, stderr; None: the connection breaks
        self.start_command = None  # or a function of pod and command -> a `Popen` with pipes: a command with an input
        self.streams_open = 0
        self.streams_most = 0
        self.page_limit = 500
        self.expire_pages = False
        self.kueue = None  # or a `kubernetes_kueue.Kueue`
        self.is_silent = False  # what is sent does not arrive
        self.closing = False
        self.uids = 0
        self.seconds = 0
        self.pod_quota = None  # or how many pods the namespace may have
        self.grace = None  # or a function that ends a pod whose Job has ended; the pod and its log live until then

    # -- objects ------------------------------------------------------------------------------------------------------

    def record_change(self, key):
        self.number += 1
        self.objects[key]["metadata"]["resourceVersion"] = str(self.number)
        self.lock.notify_all()

    def add_object(self, group, namespace, plural, item):
        with self.lock:
            key = (group, namespace, plural, item["metadata"]["name"])
            self.uids += 1
            item["metadata"].setdefault("uid", f"uid-{self.uids}")
            item["metadata"].setdefault(
                "creationTimestamp", f"2026-01-01T00:{self.uids // 60 % 60:02}:{self.uids % 60:02}Z"
            )
            self.objects[key] = item
            if self.kueue is not None:
                self.kueue.add(key, item)
            self.record_change(key)
            if plural == "jobs" and group == "/apis/batch/v1":
                self.start_job(key)
            return item

    def delete_object(self, key):
        with self.lock:
            item = self.objects.get(key)
            if item is None:
                return
            self.record_change(key)
            del self.objects[key]
            for other, owned in list(self.objects.items()):
                self.remove_owner(other, owned, item["metadata"]["uid"])

    def remove_owner(self, key, item, uid):
        """The garbage collector: an object goes with the last of its owners."""
        owners = item["metadata"].get("ownerReferences", ())
        left = [owner for owner in owners if owner["uid"] != uid]
        if len(left) == len(owners):
            return
        if left:
            item["metadata"]["ownerReferences"] = left
        else:
            self.delete_object(key)

    def expire_jobs(self):
        """The TTL controller, when much time has passed."""
        with self.lock:
            for key, item in list(self.objects.items()):
                conditions = item.get("status", {}).get("conditions", ())
                has_ended = any(each["type"] in ("Complete", "Failed") for each in conditions)
                if key[2] == "jobs" and has_ended and "ttlSecondsAfterFinished" in item["spec"]:
                    self.delete_object(key)

    def find(self, plural, **labels):
        with self.lock:
            return [
                item
                for (_, _, kind, _), item in self.objects.items()
                if kind == plural and labels.items() <= item["metadata"].get("labels", {}).items()
            ]

    # -- the Job controller -------------------------------------------------------------------------------------------

    def start_job(self, key):
        job = self.objects[key]
        if job["spec"].get("completions") == 0:
            job.setdefault("status", {})
            self.end_job(key, "Complete", "CompletionsReached")
        elif job["spec"].get("suspend"):
            job["status"] = {"conditions": [{"type": "Suspended", "status": "True", "reason": "JobSuspended"}]}
        else:
            self.create_pods(key)

    def follow_suspend(self, key, before):
        """A Job that is suspended loses its pods; one that is not any more gets them. Its deadline counts from then."""
        spec = self.objects[key]["spec"]
        if bool(before) == bool(spec.get("suspend")):
            return
        if spec.get("suspend"):
            self.remove_active_pods(key)
            self.objects[key]["status"] = {}
        elif key[2] == "jobs":  # there is no JobSet controller
            self.objects[key].pop("status", None)
            self.create_pods(key)
        self.record_change(key)

    def create_pods(self, key):
        job = self.objects[key]
        job.setdefault("status", {"active": job["spec"]["parallelism"]})
        for index in range(job["spec"]["completions"]):
            self.create_pod(job, index)

    def create_pod(self, job, index):
        self.uids += 1
        name, namespace = f"{job['metadata']['name']}-{index}-p{self.uids}", job["metadata"]["namespace"]
        template = duplicate(job["spec"]["template"])
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": job["metadata"]["name"],
            "uid": job["metadata"]["uid"],
        }
        metadata = {**template["metadata"], "name": name, "namespace": namespace, "ownerReferences": [owner]}
        metadata["labels"] = {**metadata.get("labels", {}), INDEX: str(index)}
        if "backoffLimitPerIndex" in job["spec"]:
            counts = {name: job["status"].get(name, {}).get(index, 0) for name in (INDEX_FAILURES, INDEX_IGNORED)}
            annotations = {name: str(count) for name, count in counts.items() if count or name == INDEX_FAILURES}
            metadata["annotations"] = {**metadata.get("annotations", {}), **annotations}
        pod = {"metadata": metadata, "spec": template["spec"], "status": {"phase": "Pending"}}
        used = len(self.find("pods"))
        if self.pod_quota is not None and used >= self.pod_quota:
            limits = f"requested: pods=1, used: pods={used}, limited: pods={self.pod_quota}"
            text = f'Error creating: pods "{name}" is forbidden: exceeded quota: all, {limits}'
            self.add_event(job, "FailedCreate", text, kind="Job", severity="Warning")
            return
        self.add_object("/api/v1", namespace, "pods", pod)

    def find_pod(self, job_name, index):
        """The newest pod of an index."""
        with self.lock:
            pods = [
                item
                for item in self.find("pods", **{INDEX: str(index)})
                if item["metadata"]["name"].startswith(job_name)
            ]
            return max(pods, key=lambda pod: int(pod["metadata"]["resourceVersion"]))

    def change_pod(self, pod, **status):
        with self.lock:
            key = ("/api/v1", pod["metadata"]["namespace"], "pods", pod["metadata"]["name"])
            self.objects[key]["status"] = {**self.objects[key]["status"], **status}
            self.record_change(key)

    def start_pod(self, pod):
        self.change_pod(pod, phase="Running")

    def end_pod(self, pod, code, message="", conditions=()):
        ended = {
            "exitCode": code,
            "reason": "Error" if code else "Completed",
            "message": message,
            "finishedAt": "2026-01-01T01:00:00Z",
        }
        status = [{"name": "main", "state": {"terminated": ended}}]
        with self.lock:
            self.change_pod(
                pod, phase="Failed" if code else "Succeeded", containerStatuses=status, conditions=list(conditions)
            )
            self.apply_policies(pod, code, conditions)

    def remove_pod(self, pod, code=143, event=("Killing", "Stopping container main"), conditions=()):
        """A user deletes a pod: its container ends, the Job controller counts it, the pod and its log are gone."""
        self.add_event(pod, *event)
        self.end_pod(pod, code, conditions=conditions)
        self.delete_object(("/api/v1", pod["metadata"]["namespace"], "pods", pod["metadata"]["name"]))

    def add_event(self, about, reason, message, kind="Pod", severity="Normal"):
        with self.lock:
            self.seconds += 1
            item = {"type": severity, "reason": reason, "message": message}
            item["firstTimestamp"] = item["lastTimestamp"] = self.now()
            item["involvedObject"] = {"kind": kind, "name": about["metadata"]["name"]}
            item["metadata"] = {"name": f"{about['metadata']['name']}.{self.seconds}"}
            self.add_object("/api/v1", about["metadata"]["namespace"], "events", item)

    def now(self):
        return f"2026-01-01T02:{self.seconds // 60:02}:{self.seconds % 60:02}Z"

    def apply_policies(self, pod, code, conditions):
        owner = pod["metadata"]["ownerReferences"][0]["name"]
        key = ("/apis/batch/v1", pod["metadata"]["namespace"], "jobs", owner)
        job = self.objects[key]
        status, spec = job["status"], job["spec"]
        index = int(pod["metadata"]["labels"][INDEX])
        action = self.find_action(spec, code, conditions)
        counted = status.setdefault(INDEX_IGNORED if action == "Ignore" else INDEX_FAILURES, {})
        counted[index] = counted.get(index, 0) + (code != 0)
        if code == 0:
            done = status.setdefault("succeeded", 0) + 1
            status["succeeded"] = done
            enough = spec.get("successPolicy", {}).get("rules", [{}])[0].get("succeededCount", spec["completions"])
            if done >= min(enough, spec["completions"]):
                self.end_job(key, "Complete", "")
        elif action == "FailJob":
            self.end_job(key, "Failed", "PodFailurePolicy")
        else:
            if action != "Ignore":
                status["failed"] = status.get("failed", 0) + 1
            if status.get(INDEX_FAILURES, {}).get(index, 0) > spec.get("backoffLimitPerIndex", 2**31):
                status["failedIndexes"] = str(index)
                self.end_job(key, "Failed", "FailedIndexes")
            elif status.get("failed", 0) > spec["backoffLimit"]:
                self.end_job(key, "Failed", "BackoffLimitExceeded")
            else:
                self.create_pod(job, index)
        if key in self.objects:
            self.record_change(key)

    def find_action(self, spec, code, conditions):
        for rule in spec.get("podFailurePolicy", {}).get("rules", ()):
            wanted = {item["type"] for item in rule.get("onPodConditions", ())}
            if wanted & {item["type"] for item in conditions} or code in rule.get("onExitCodes", {}).get("values", ()):
                return rule["action"]
        return "Count"

    def end_job(self, key, kind, reason):
        job = self.objects[key]
        conditions = job["status"].setdefault("conditions", [])
        condition = {"type": kind, "status": "True", "reason": reason, "message": reason}
        conditions.append({**condition, "lastTransitionTime": self.now()})
        job["status"]["active"] = 0
        ends = ("Completed", "Job completed") if kind == "Complete" else (reason, reason)
        self.add_event(job, *ends, kind="Job", severity="Normal" if kind == "Complete" else "Warning")
        self.remove_active_pods(key)

    def remove_active_pods(self, key):
        uid = self.objects[key]["metadata"]["uid"]
        for other, item in list(self.objects.items()):
            owned = any(owner["uid"] == uid for owner in item["metadata"].get("ownerReferences", ()))
            if other[2] == "pods" and owned and item["status"]["phase"] in ("Pending", "Running"):
                self.add_event(item, "Killing", "Stopping container main")
                if self.grace is None or item["status"]["phase"] == "Pending":
                    self.delete_object(other)  # with its log
                    continue
                item["metadata"]["deletionTimestamp"] = self.now()
                self.record_change(other)
                threading.Thread(target=self.end_gracefully, args=(other, item), daemon=True).start()

    def resize_job(self, key, nodes):
        """A resize: the pods of the highest indexes end, and go; those that are missing are created."""
        job = self.objects[key]
        self.remove_pods(job, nodes)
        if self.grace is None or job["spec"].get("suspend") or "active" not in job.get("status", {}):
            return  # tests that act as the kubelet create no pods by a resize
        uid = job["metadata"]["uid"]
        owned = [item for item in self.find("pods") if item["metadata"]["ownerReferences"][0]["uid"] == uid]
        there = {int(item["metadata"]["labels"][INDEX]) for item in owned}
        for index in sorted(set(range(nodes)) - there):
            self.create_pod(job, index)

    def remove_pods(self, job, nodes):
        uid = job["metadata"]["uid"]
        for key, item in list(self.objects.items()):
            owned = any(owner["uid"] == uid for owner in item["metadata"].get("ownerReferences", ()))
            if key[2] == "pods" and owned and int(item["metadata"]["labels"][INDEX]) >= nodes:
                self.delete_object(key)

    def end_gracefully(self, key, pod):
        """As a kubelet: the container gets SIGTERM, may write, and ends; then the pod goes, with its log."""
        self.grace(pod)
        self.delete_object(key)

    # -- logs ---------------------------------------------------------------------------------------------------------

    def write_log(self, pod, text, second=0, nanos=0):
        """Appends a line (or a last piece without newline) to a pod's log."""
        with self.lock:
            stamp = f"2026-01-01T00:{second // 60:02}:{second % 60:02}.{nanos:09}Z"
            self.logs.setdefault(pod["metadata"]["name"], []).append((second, f"{stamp} {text}".encode()))
            self.lock.notify_all()

    def break_log(self, pod, after_bytes):
        """The next follow of this pod's log is cut off after so many bytes."""
        with self.lock:
            self.breaks.setdefault(pod["metadata"]["name"], []).append(after_bytes)

    def fail_first(self, forbids, fails):
        """Refuse the first requests: 403, as a server that has not read the rights yet, and then 500."""
        forbidden = 'jobs.batch is forbidden: User "bot" cannot list resource "jobs" in API group "batch"'
        self.faults.append(Fault("", "", 403, forbidden, "Forbidden", times=forbids))
        self.faults.append(Fault("", "", 500, "Internal Server Error", "InternalError", times=fails))

    def count(self, method, part):
        with self.lock:
            return sum(1 for verb, path in self.requests if verb == method and part in path)


class Cut(Exception):
    """The connection breaks."""


class Silence(Exception):
    """Nothing comes, for as long as the client waits."""


@dataclass
class Response:
    """What a request is answered with."""

    status: int = 200
    body: bytes = b""
    headers: dict = field(default_factory=dict)
    stream: Iterator[bytes] | None = None
    """After or in place of a body, as it comes; b"": nothing has come for a while. A websocket's is frames."""
    process: Any = None
    """A websocket's other end, with an input."""

    def render(self) -> Iterator[bytes]:
        """The bytes on the wire. Raises Cut and Silence."""
        is_chunked = self.stream is not None and self.status == 200
        length = {} if self.status == 101 else {"Content-Length": len(self.body)}
        headers = {**({"Transfer-Encoding": "chunked"} if is_chunked else length), **self.headers}
        lines = [f"HTTP/1.1 {self.status} -", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        yield "\r\n".join(lines).encode() + self.body
        for data in self.stream or ():
            yield f"{len(data):x}\r\n".encode() + data + b"\r\n" if is_chunked and data else data
        if is_chunked:
            yield b"0\r\n\r\n"


def respond(cluster: Cluster, method: str, target: str, headers: Mapping[str, str], content: bytes) -> Response:
    """The response to one request. Raises Cut and Silence."""
    return Request(cluster, method, target, headers, json.loads(content) if content else None).respond()


class Request:
    """One request."""

    def __init__(self, cluster, method, target, headers, body):
        self.cluster, self.method, self.target, self.headers, self.body = cluster, method, target, headers, body
        url = urlsplit(target)
        self.path, self.words = url.path, parse_qsl(url.query)
        self.query = dict(self.words)

    def respond(self):
        cluster, path = self.cluster, self.path
        with cluster.lock:
            cluster.requests.append((self.method, self.target))
        fault = self.find_fault()
        try:
            self.authenticate()
            self.authorize()
            if fault is not None and not fault.after:
                return self.fail(fault)
            if path.endswith("/exec"):
                return self.execute()
            if path.endswith("/log"):
                return self.read_log()
            answer = self.answer(self.method, path, self.query, self.body)
            return self.fail(fault) if fault is not None else self.build_json(200, answer)
        except Refusal as refusal:
            status = {"kind": "Status", "message": refusal.message, "reason": refusal.reason}
            return self.build_json(refusal.status, status)

    def build_json(self, status, answer, headers=None):
        body = json.dumps(answer).encode()
        if self.headers.get("Upgrade") and status == 403:
            body = body[:60]  # all that some clients read of it
        return Response(status, body, {"Content-Type": "application/json", **(headers or {})})

    def authenticate(self):
        if self.headers.get("Authorization") != f"Bearer {self.cluster.token}":
            raise Refusal(401, "Unauthorized", "Unauthorized")

    def authorize(self):
        method = self.method
        match, allowed = PATH.match(self.path), self.cluster.allowed
        if allowed is None or match is None:
            return  # all accounts may read versions and discovery
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(method)
        if verb is None:
            verb = "get" if match["name"] else "list"
        plural = f"{match['plural']}/{match['sub']}" if match["sub"] else match["plural"]
        group = match["group"].split("/")[2] if match["group"].startswith("/apis/") else ""
        if verb not in allowed.get(f"{plural}.{group}" if group else plural, ()):
            account = "system:serviceaccount:team:bot"
            where = f'in API group "{group}" in the namespace "{match["namespace"]}"'
            name = f"{plural}{'.' + group if group else ''}{' ' + repr(match['name']) if match['name'] else ''}"
            text = f'{name} is forbidden: User "{account}" cannot {verb} resource "{plural}" {where}'
            raise Refusal(403, text.replace("'", '"'), "Forbidden")

    def find_fault(self):
        method, path = self.method, self.target
        with self.cluster.lock:
            for fault in self.cluster.faults:
                if fault.method in (method, "") and re.search(fault.path, path) and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def fail(self, fault):
        if fault.status == 0:
            raise Cut
        status = {"kind": "Status", "message": fault.message, "reason": fault.reason}
        return self.build_json(fault.status, status, fault.headers)

    def execute(self):
        """A websocket, as the API server and the kubelet serve it: what the command prints, then a Status."""
        cluster, match = self.cluster, PATH.match(self.path)
        with cluster.lock:
            pod = cluster.objects.get((match["group"], match["namespace"], "pods", match["name"]))
        if pod is None:
            raise Refusal(404, f'pods "{match["name"]}" not found', "NotFound")
        if pod["status"]["phase"] != "Running" or match["name"] in cluster.dead_containers:
            raise Refusal(400, "container not found", "BadRequest")
        command = [value for name, value in self.words if name == "command"]
        assert ("stdout", "true") in self.words
        with cluster.lock:
            cluster.commands.append((match["name"], self.query["container"], command))
        offered = [each.strip() for each in self.headers["Sec-WebSocket-Protocol"].split(",")]
        accepted = hashlib.sha1((self.headers["Sec-WebSocket-Key"] + WEBSOCKET_GUID).encode()).digest()
        headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
        headers["Sec-WebSocket-Accept"] = base64.b64encode(accepted).decode()
        headers["Sec-WebSocket-Protocol"] = "v5.channel.k8s.io" if "v5.channel.k8s.io" in offered else offered[0]
        if ("stdin", "true") in self.words:
            return Response(101, headers=headers, process=cluster.start_command(pod, command))
        return Response(101, headers=headers, stream=run_frames(cluster, pod, command))

    # -- requests -----------------------------------------------------------------------------------------------------

    def answer(self, method, path, query, body):
        cluster = self.cluster
        if path == "/version":
            return {"major": cluster.version[0], "minor": cluster.version[1]}
        discovery = self.discover(path)
        if discovery is not None:
            return discovery
        match = PATH.match(path)
        if match is None:
            raise Refusal(404, "404 page not found")
        group, namespace, plural, name = match["group"], match["namespace"], match["plural"], match["name"]
        api_version = group.removeprefix("/api/").removeprefix("/apis/")
        if api_version != "v1" and plural not in cluster.kinds.get(api_version, ()):
            raise Refusal(404, "the server could not find the requested resource", "NotFound")
        with cluster.lock:
            key = (group, namespace, plural, name)
            if method == "GET" and name is None:
                return self.list(group, namespace, plural, query)
            if method == "POST":
                return self.create(group, namespace, plural, query, body)
            if key not in cluster.objects:
                raise Refusal(404, f'{plural} "{name}" not found', "NotFound")
            if method == "PATCH":
                return self.patch(key, body)
            if method == "DELETE":
                assert body["propagationPolicy"] == "Background"
                cluster.delete_object(key)
                return {"kind": "Status", "status": "Success"}
            return cluster.objects[key]

    def discover(self, path):
        parts = path.strip("/").split("/")
        if parts[0] != "apis" or len(parts) > 3:
            return None
        if len(parts) == 2:
            versions = self.cluster.groups.get(parts[1])
            if versions is None:
                raise Refusal(404, "404 page not found")
            listed = [{"groupVersion": f"{parts[1]}/{version}"} for version in versions]
            return {"kind": "APIGroup", "versions": listed, "preferredVersion": listed[0]}
        kinds = self.cluster.kinds.get("/".join(parts[1:]))
        if kinds is None:
            raise Refusal(404, "404 page not found")
        return {"kind": "APIResourceList", "resources": [{"name": name} for name in kinds]}

    def create(self, group, namespace, plural, query, body):
        cluster = self.cluster
        assert query.get("fieldValidation") == "Strict" or plural == "events"
        try:
            judge(body, ".".join(cluster.version))
        except Unknown as error:
            raise Refusal(400, f"strict decoding error: {error}", "BadRequest") from error
        for value in (body.get("data") or {}).values():
            base64.b64decode(value, validate=True)
        try:
            check_create(body)
        except Broken as broken:
            raise Refusal(
                422, f'{body["kind"]} "{body["metadata"]["name"]}" is invalid: {broken}', "Invalid"
            ) from broken
        if body.get("kind") != KINDS.get(plural, body.get("kind")) or body["metadata"].get("namespace") != namespace:
            raise Refusal(400, f"a {body.get('kind')} does not belong here", "BadRequest")
        key = (group, namespace, plural, body["metadata"]["name"])
        if key in cluster.objects:
            raise Refusal(409, f'{plural} "{key[3]}" already exists', "AlreadyExists")
        if query.get("dryRun") == "All":
            return {**body, "metadata": {**body["metadata"], "uid": "dry"}}
        return cluster.add_object(group, namespace, plural, duplicate(body))

    def patch(self, key, change):
        assert self.headers["Content-Type"] == "application/merge-patch+json"
        item = self.cluster.objects[key]
        changed = duplicate(item)
        merge(changed, change)
        try:
            check_update(item, changed)
            if self.cluster.kueue is not None:
                self.cluster.kueue.check_update(item, changed)
        except Broken as broken:
            raise Refusal(422, f'{key[2]} "{key[3]}" is invalid: {broken}', "Invalid") from broken
        suspended = item.get("spec", {}).get("suspend")
        merge(item, change)
        if key[2] in ("jobs", "jobsets"):
            self.cluster.follow_suspend(key, suspended)
        nodes = change.get("spec", {}).get("completions")
        if key[2] == "jobs" and nodes is not None:
            self.cluster.resize_job(key, nodes)
        # the deadline counts from the start of the pods, which a suspended Job has not seen
        deadline_s = change.get("spec", {}).get("activeDeadlineSeconds")
        is_over = (
            deadline_s is not None and deadline_s <= 60
        )  # these Jobs are an hour old, and this is no deadline ahead
        if key[2] == "jobs" and is_over and not item["spec"].get("suspend"):
            self.cluster.end_job(key, "Failed", "DeadlineExceeded")
        self.cluster.record_change(key)
        return item

    def list(self, group, namespace, plural, query):
        cluster = self.cluster
        wanted = self.build_filter(query)
        items = [
            item
            for (own_group, own_namespace, own_plural, _), item in sorted(
                cluster.objects.items(), key=lambda pair: pair[0][3]
            )
            if (own_group, own_plural) == (group, plural) and own_namespace == namespace and wanted(item)
        ]
        limit = min(int(query.get("limit", cluster.page_limit)), cluster.page_limit)
        begin = 0
        if "continue" in query:
            if cluster.expire_pages:
                cluster.expire_pages = False
                raise Refusal(410, "The provided continue parameter is too old", "Expired")
            begin = int(query["continue"])
        hidden = ("kind", "apiVersion")
        if "as=PartialObjectMetadataList" in self.headers["Accept"]:
            hidden += ("spec", "status", "data", "binaryData")
        page = [
            {key: value for key, value in item.items() if key not in hidden} for item in items[begin : begin + limit]
        ]
        token = str(begin + limit) if begin + limit < len(items) else ""
        return {"kind": "List", "metadata": {"resourceVersion": str(cluster.number), "continue": token}, "items": page}

    def build_filter(self, query):
        labels = dict(part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part)
        fields = [re.split("(!?=)", part, maxsplit=1) for part in query.get("fieldSelector", "").split(",") if part]

        def find(item, path):
            for part in path.split("."):
                item = item.get(part, {})
            return item

        def wanted(item):
            own = item["metadata"].get("labels", {})
            fits = all((find(item, name) == value) is (sign == "=") for name, sign, value in fields)
            return labels.items() <= own.items() and fits

        return wanted

    # -- streams ------------------------------------------------------------------------------------------------------

    def count_stream(self, stream):
        cluster = self.cluster
        with cluster.lock:
            cluster.streams_open += 1
            cluster.streams_most = max(cluster.streams_most, cluster.streams_open)
        try:
            yield from stream
        finally:
            with cluster.lock:
                cluster.streams_open -= 1

    def read_log(self):
        cluster, query, match = self.cluster, self.query, PATH.match(self.path)
        name, key = match["name"], ("/api/v1", match["namespace"], "pods", match["name"])
        with cluster.lock:
            if key not in cluster.objects:
                raise Refusal(404, f'pods "{name}" not found', "NotFound")
            if cluster.objects[key]["status"]["phase"] == "Pending":
                raise Refusal(400, f'container "main" in pod "{name}" is waiting to start', "BadRequest")
            node = cluster.objects[key]["spec"].get("nodeName")
        assert query["timestamps"] == "true"
        since = query.get("sinceTime", "")
        begin = int(since[14:16]) * 60 + int(since[17:19]) if since else 0
        begin = 0 if since.startswith("2025") else begin
        if node in cluster.hanging_nodes:
            raise Silence
        if node in cluster.dead_nodes:
            address = "172.18.0.3:10250"
            asked = f"https://{address}/containerLogs/team/{name}/main?timestamps=true"
            raise Refusal(500, f'Get "{asked}": dial tcp {address}: connect: no route to host')
        if query.get("follow") == "true":
            return Response(stream=self.count_stream(self.follow(key, name, begin)))
        with cluster.lock:
            return Response(body=b"".join(text for second, text in cluster.logs.get(name, ()) if second >= begin))

    def follow(self, key, name, begin):
        cluster = self.cluster
        with cluster.lock:
            limit = cluster.breaks[name].pop(0) if cluster.breaks.get(name) else None
            written, position = 0, max(0, len(cluster.logs.get(name, ())) - int(self.query.get("tailLines", 10**9)))
        while not cluster.closing:
            with cluster.lock:
                lines = cluster.logs.get(name, [])[position:]
                running = key in cluster.objects and cluster.objects[key]["status"]["phase"] == "Running"
                if not lines and running:
                    cluster.lock.wait(0.05)
            if not lines:
                if not running:
                    return
                yield b""
                continue
            position += len(lines)
            data = b"".join(text for second, text in lines if second >= begin)
            if limit is not None and written + len(data) >= limit:
                yield data[: limit - written] or b"2"
                raise Cut
            if data:
                yield data
                written += len(data)


def merge(target, change):
    for name, value in change.items():
        if value is None:
            target.pop(name, None)
        elif isinstance(value, dict) and isinstance(target.get(name), dict):
            merge(target[name], value)
        else:
            target[name] = value


def run_frames(cluster, pod, command):
    """Run a command of a pod: the frames of what it prints, and of its end."""
    done = cluster.run_command(pod, command)
    if done is None:
        raise Cut
    code, output, errors = done
    half = len(output) // 2  # a pipe is read in pieces
    for channel, data in ((1, output[:half]), (2, errors), (1, output[half:])):
        yield encode_frame(2, bytes([channel]) + data)
    yield encode_exit(code)


def encode_exit(code):
    status = {"status": "Success"}
    if code:
        causes = [{"reason": "ExitCode", "message": str(code)}]
        status = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
    return encode_frame(2, b"\3" + json.dumps(status).encode()) + encode_frame(8, (1000).to_bytes(2, "big"))


def encode_frame(opcode, data):
    size = len(data)
    if size < 126:
        head = bytes([size])
    elif size < 1 << 16:
        head = b"\x7e" + size.to_bytes(2, "big")
    else:
        head = b"\x7f" + size.to_bytes(8, "big")
    return bytes([0x80 | opcode]) + head + data


def write_kubeconfig(path, cluster, *, token=None, namespace="team"):
    """A kubeconfig for the double."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "double",
        "clusters": [{"name": "double", "cluster": {"server": cluster.url}}],
        "users": [{"name": "me", "user": {"token": token or cluster.token}}],
        "contexts": [{"name": "double", "context": {"cluster": "double", "user": "me", "namespace": namespace}}],
    }
    path.write_text(json.dumps(config))
