"""Rules of the real API server besides unknown fields: those of validation.go that our documents could break.

Each rule was observed on kube-apiserver 1.36.2, with this wording. Source: pkg/apis/batch/validation,
pkg/apis/core/validation and k8s.io/apimachinery/pkg/api/validation of kubernetes/kubernetes.
"""

import base64
import re

LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_1123 = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
QUALIFIED = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)
KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
QUANTITY = re.compile(r"([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)")
STANDARD = ("cpu", "memory", "ephemeral-storage")
MEBIBYTE = 1 << 20
IMMUTABLE = ("selector", "template", "completionMode", "podFailurePolicy", "backoffLimitPerIndex", "successPolicy")
NATIVE = ("v1", "batch/v1")


class Broken(ValueError):
    """A document breaks a rule; the text is the server's."""


def need(valid, path, text):
    if not valid:
        raise Broken(f"{path}: {text}")


def check_create(document):
    """Raises Broken."""
    if document["apiVersion"] not in NATIVE:
        return
    check_metadata(document)
    checks = {"Job": check_job, "ConfigMap": check_config_map, "Secret": check_secret, "Service": check_service}
    checks["Event"] = check_event
    checks.get(document["kind"], lambda _: None)(document)


def check_update(old, new):
    """Raises Broken. `old` is the object before the patch."""
    owners = new["metadata"].get("ownerReferences", ())
    for owner in owners:
        for name in ("apiVersion", "kind", "name", "uid"):
            need(owner.get(name), f"metadata.ownerReferences.{name}", "Required value")
    need(sum(bool(owner.get("controller")) for owner in owners) < 2, "metadata.ownerReferences", "Only one controller")
    if old.get("immutable"):
        for name in ("data", "binaryData", "immutable"):
            need(old.get(name) == new.get(name), name, "Forbidden: field is immutable when `immutable` is set")
    if new.get("kind") == "Job" and new.get("apiVersion") == "batch/v1":
        before, after = old["spec"], new["spec"]
        for name in IMMUTABLE:
            need(before.get(name) == after.get(name), f"spec.{name}", "Invalid value: field is immutable")
        moved = before["completions"] != after["completions"]
        together = "can only be modified in tandem with spec.parallelism"
        need(not moved or after["completions"] == after["parallelism"], "spec.completions", together)
        check_job(new)


def check_metadata(document):
    metadata = document["metadata"]
    need(SUBDOMAIN.fullmatch(metadata["name"]), "metadata.name", "Invalid value: a lowercase RFC 1123 subdomain")
    check_labels(metadata.get("labels", {}), "metadata.labels")
    annotations = metadata.get("annotations", {})
    size = sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items())
    need(size <= 256 * 1024, "metadata.annotations", "Too long: may not be more than 262144 bytes")
    for key in annotations:
        need(QUALIFIED.fullmatch(key.lower()), "metadata.annotations", f"Invalid value: {key!r}")


def check_labels(labels, path):
    for key, value in labels.items():
        need(QUALIFIED.fullmatch(key), path, f"Invalid value: {key!r}: name part must consist of")
        need(LABEL_VALUE.fullmatch(value), path, f"Invalid value: {value!r}: a valid label must be")


def check_event(document):
    """The rules of both groups: v1 has the first, events.k8s.io the others, too."""
    about = document["involvedObject"]
    same = about.get("namespace", "") == document["metadata"].get("namespace")
    need(same, "involvedObject.namespace", "Invalid value: does not match event.namespace")
    need(document["type"] in ("Normal", "Warning"), "type", "Invalid value: has invalid value")
    need(0 < len(document["reason"]) <= 128, "reason", "can have at most 128 characters")
    need(len(document["message"].encode()) <= 1024, "message", "can have at most 1024 characters")
    need(len(document.get("reportingInstance", "")) <= 128, "reportingInstance", "can have at most 128 characters")


def check_config_map(document):
    total = sum(len(value.encode()) for value in document.get("data", {}).values())
    total += sum(len(base64.b64decode(value)) for value in document.get("binaryData", {}).values())
    for key in (*document.get("data", {}), *document.get("binaryData", {})):
        need(KEY.fullmatch(key), f"data[{key}]", "Invalid value: a valid config key must consist of")
    need(total <= MEBIBYTE, "[]", "Too long: may not be more than 1048576 bytes")


def check_secret(document):
    values = document.get("data", {})
    for key in values:
        need(KEY.fullmatch(key), f"data[{key}]", "Invalid value: a valid config key must consist of")
    need(sum(len(base64.b64decode(value)) for value in values.values()) <= MEBIBYTE, "data", "Too long")


def check_service(document):
    name = document["metadata"]["name"]
    need(LABEL_1035.fullmatch(name), "metadata.name", "Invalid value: a DNS-1035 label must consist of")
    headless = document["spec"].get("clusterIP") == "None"
    need(headless or document["spec"].get("ports"), "spec.ports", "Required value")


# -- jobs -------------------------------------------------------------------------------------------------------------


def check_job(document):
    spec, name = document["spec"], document["metadata"]["name"]
    completions, parallelism = spec.get("completions"), spec.get("parallelism", 1)
    indexed = spec.get("completionMode") == "Indexed"
    need(not indexed or completions is not None, "spec.completions", "Required value: when completion mode is Indexed")
    need(not indexed or parallelism <= 100_000, "spec.parallelism", "must be less than or equal to 100000")
    for key in ("parallelism", "completions", "backoffLimit", "backoffLimitPerIndex", "activeDeadlineSeconds"):
        need(0 <= (spec.get(key) or 0) < 2**31, f"spec.{key}", "must be greater than or equal to 0")
    if indexed and completions:
        last = f"{name}-{completions - 1}"
        fits = LABEL_1123.fullmatch(last)
        need(fits, "metadata.name", f"will not able to create pod with invalid DNS label: {last}")
    per_index, most = spec.get("backoffLimitPerIndex"), spec.get("maxFailedIndexes")
    need(most is None or per_index is not None, "spec.backoffLimitPerIndex", "Required value: when maxFailedIndexes is")
    need(per_index is None or indexed, "spec.backoffLimitPerIndex", "requires indexed completion mode")
    need(most is None or most <= completions, "spec.maxFailedIndexes", "must be less than or equal to completions")
    replacement = spec.get("podReplacementPolicy", "Failed" if "podFailurePolicy" in spec else "TerminatingOrFailed")
    need(replacement in ("Failed", "TerminatingOrFailed"), "spec.podReplacementPolicy", "Unsupported value")
    if "podFailurePolicy" in spec:
        need(replacement == "Failed", "spec.podReplacementPolicy", 'Unsupported value: supported values: "Failed"')
        check_failure_policy(spec)
    if "successPolicy" in spec:
        need(indexed, "spec.successPolicy", "requires indexed completion mode")
        for rule in spec["successPolicy"]["rules"]:
            need(rule["succeededCount"] <= completions, "spec.successPolicy", "must be less than or equal to")
    policy = spec["template"]["spec"].get("restartPolicy")
    need(policy in ("Never", "OnFailure"), "spec.template.spec.restartPolicy", "Required value")
    only = 'only "Never" is supported when podFailurePolicy is specified'
    need("podFailurePolicy" not in spec or policy == "Never", "spec.template.spec.restartPolicy", only)
    check_labels(spec["template"].get("metadata", {}).get("labels", {}), "spec.template.metadata.labels")
    check_pod(spec["template"]["spec"], "spec.template.spec")


def check_failure_policy(spec):
    names = [item["name"] for item in spec["template"]["spec"]["containers"]]
    for rule in spec["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        path = "spec.podFailurePolicy.rules"
        need(
            bool(codes) != bool(rule.get("onPodConditions")), path, "specifying one of OnExitCodes and OnPodConditions"
        )
        if codes:
            values = codes["values"]
            need(codes["operator"] != "In" or 0 not in values, path, "must not be 0 for the In operator")
            need(values == sorted(set(values)), path, "must be ordered")
            need(codes.get("containerName", names[0]) in names, path, "must be one of the container or initContainer")


# -- pods -------------------------------------------------------------------------------------------------------------


def check_pod(spec, path):
    volumes = [volume["name"] for volume in spec.get("volumes", ())]
    for volume in spec.get("volumes", ()):
        check_volume(volume, path)
    need(len(set(volumes)) == len(volumes), f"{path}.volumes", "Duplicate value")
    need(spec["containers"], f"{path}.containers", "Required value")
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        check_container(container, volumes, f"{path}.containers")
    for toleration in spec.get("tolerations", ()):
        effect, seconds = toleration.get("effect"), toleration.get("tolerationSeconds")
        lasting = "effect must be 'NoExecute' when `tolerationSeconds` is set"
        need(seconds is None or effect == "NoExecute", f"{path}.tolerations", lasting)
        exists = toleration.get("operator") == "Exists"
        need(not exists or not toleration.get("value"), f"{path}.tolerations", "value must be empty when `operator` is")
    check_labels(spec.get("nodeSelector", {}), f"{path}.nodeSelector")
    for name in ("subdomain", "hostname"):
        need(LABEL_1123.fullmatch(spec.get(name, "x")), f"{path}.{name}", "a lowercase RFC 1123 label must consist of")
    grace_s = spec.get("terminationGracePeriodSeconds", 30)
    need(grace_s >= 0, f"{path}.terminationGracePeriodSeconds", "must be greater than or equal to 0")


def check_volume(volume, path):
    sources = volume.keys() - {"name"}
    need(len(sources) == 1, f"{path}.volumes", "may not specify more than 1 volume type")
    host = volume.get("hostPath", {}).get("path", "/")
    need(".." not in host.split("/"), f"{path}.volumes.hostPath.path", "must not contain '..'")
    size = str(volume.get("emptyDir", {}).get("sizeLimit", "1"))
    need(QUANTITY.fullmatch(size), f"{path}.volumes", "quantities must match the regular expression")
    need(LABEL_1123.fullmatch(volume["name"]), f"{path}.volumes.name", "a lowercase RFC 1123 label must consist of")


def check_container(container, volumes, path):
    need(container.get("image"), f"{path}.image", "Required value")
    places = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
    need(len(set(places)) == len(places), f"{path}.volumeMounts.mountPath", "must be unique")
    for mount in container.get("volumeMounts", ()):
        need(mount["name"] in volumes, f"{path}.volumeMounts.name", f"Not found: {mount['name']!r}")
    for item in container.get("env", ()):
        need(ENV_NAME.fullmatch(item["name"]), f"{path}.env", "a valid environment variable name must consist of")
        both = "may not be specified when `value` is not empty"
        need(not (item.get("value") and item.get("valueFrom")), f"{path}.env.valueFrom", both)
    requests, limits = (container.get("resources", {}).get(name, {}) for name in ("requests", "limits"))
    for name, amount in (*requests.items(), *limits.items()):
        qualified = name in STANDARD or ("/" in name and QUALIFIED.fullmatch(name))
        need(qualified, f"{path}.resources[{name}]", "must be a standard resource type or fully qualified")
        need(QUANTITY.fullmatch(str(amount)), f"{path}.resources[{name}]", "quantities must match")
        if name not in STANDARD:
            need(requests.get(name, amount) == limits.get(name), f"{path}.resources", "Limit must be set for non overc")
    security = container.get("securityContext", {})
    contradicts = security.get("privileged") and security.get("allowPrivilegeEscalation") is False
    need(not contradicts, f"{path}.securityContext", "cannot set `allowPrivilegeEscalation` to false and `privileged`")
    for port in container.get("ports", ()):
        need(0 < port["containerPort"] < 65536, f"{path}.ports", "must be between 1 and 65535, inclusive")
