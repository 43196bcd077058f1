"""The adapter's options: what `-cfg` may say, checked strictly and offline."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from muster.schedulers.errors import OptionError
from muster.schedulers.kubernetes import syntax
from muster.schedulers.kubernetes.schema import VERSION_SENTENCE, load_table, parse_version
from muster.schedulers.runner.options import StrictOpts

FLAVORS: Final = ("job", "jobset", "volcano")
GANGS: Final = ("auto", "none", "kueue", "podgroup", "volcano")
AGENTS: Final = ("bundled", "image")
SECURITIES: Final = ("baseline", "restricted")
PULL_POLICIES: Final = ("Always", "IfNotPresent", "Never")
_DEVICE: Final = re.compile(rf"{syntax.RESOURCE.pattern}(:[1-9]\d*)?", re.ASCII)
EFFECTS: Final = ("NoSchedule", "PreferNoSchedule", "NoExecute")


@dataclass(frozen=True, kw_only=True)
class Options:
    """One submission's options, checked."""

    namespace: str | None = None
    """None: the context's, or the pod's own in a cluster, or "default"."""
    context: str | None = None
    kubeconfig: str | None = None
    flavor: str = "job"
    queue: str | None = None
    priority_class: str | None = None
    service_account: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    image_pull_policy: str | None = None
    image_repo: str | None = None
    quiet: bool = False
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    """As Kubernetes writes them."""
    pod_template: Mapping[str, Any] | None = None
    ttl_s: int | None = None
    shm_size: str | None = None
    grace_s: int | None = None
    rdma: str | None = None
    """"true": only the right to lock memory; else RESOURCE or RESOURCE:COUNT."""
    gang: str = "auto"
    agent: str = "bundled"
    security: str = "baseline"
    suspend: bool = False
    kube_version: tuple[int, int] | None = None
    """None: the newest we know."""
    validate_spec: bool = True
    reserved_millicpu: int = 0
    reserved_memmb: int = 0
    efa_device_count: int | None = None

    @property
    def schema_version(self) -> tuple[int, int]:
        """The version that documents are checked against."""
        return self.kube_version or load_table().newest

    @property
    def resolved_gang(self) -> str:
        """`gang` as far as it can be known without asking the cluster; "auto" stays only where discovery decides."""
        if self.gang != "auto":
            return self.gang
        if self.flavor == "volcano":
            return "volcano"
        return "kueue" if self.queue else "auto"


def declare_options(opts: StrictOpts) -> None:
    """Adds the options of `torchx runopts kubernetes`."""
    for name, type_, default, text in _TABLE:
        opts.add(name, type_=type_, default=default, help=text)


_TABLE: Final[tuple[tuple[str, Any, Any, str], ...]] = (
    ("namespace", str, None, "namespace of the job; default: the context's, then 'default'"),
    ("context", str, None, "context of the kubeconfig; default: its current one"),
    (
        "kubeconfig",
        str,
        None,
        "path of the kubeconfig; default: $KUBECONFIG, ~/.kube/config, then the pod's own account",
    ),
    ("flavor", str, "job", f"one of {', '.join(FLAVORS)}; job needs nothing installed in the cluster"),
    ("queue", str, None, "Kueue's LocalQueue (flavor job, jobset) or Volcano's queue"),
    ("priority_class", str, None, "PriorityClass of the pods; with Kueue, the WorkloadPriorityClass"),
    ("service_account", str, None, "service account of the pods; its token is mounted only if pod_template says so"),
    ("image_pull_secrets", list[str], None, "names of image pull secrets, separated by ;"),
    ("image_pull_policy", str, None, f"one of {', '.join(PULL_POLICIES)}; default: Kubernetes' own"),
    ("image_repo", str, None, "build an image of the workspace on top of the job's and push it there (needs Docker)"),
    ("quiet", bool, False, "with image_repo: do not print the build's output"),
    ("node_selector", dict[str, str], None, "labels a node must have, KEY:VALUE separated by ;"),
    ("tolerations", list[str], None, "KEY[:VALUE][:EFFECT][:SECONDS] separated by ;"),
    (
        "pod_template",
        str,
        None,
        "patch of the pod template: a YAML or JSON file, or inline JSON; the container is 'main'",
    ),
    ("ttl_s", int, None, "seconds after its end until the job is deleted; default: never"),
    ("shm_size", str, None, "size of /dev/shm, e.g. 16Gi; default: half the memory limit, 8Gi without one"),
    ("grace_s", int, None, "seconds between SIGTERM and SIGKILL of a pod; default: the agent's shutdown timeout + 15"),
    (
        "rdma",
        str,
        None,
        "RESOURCE[:COUNT] of the RDMA device, e.g. rdma/hca:1, or 'true' for the right to lock memory alone",
    ),
    ("gang", str, "auto", f"one of {', '.join(GANGS)}; auto: Kueue with a queue, else what the cluster offers"),
    ("agent", str, "bundled", "bundled: the agent travels with the job; image: the image has torchx-muster"),
    ("security", str, "baseline", "baseline, or restricted: also not root (uid 1000) and no host paths"),
    ("suspend", bool, False, "create the job suspended"),
    ("kube_version", str, None, "version a dry run is checked against, e.g. 1.31; default: the newest known"),
    (
        "validate_spec",
        bool,
        True,
        "let the cluster check every object (a server-side dry run) before anything is created",
    ),
    ("reserved_millicpu", int, 0, "CPU a node keeps for itself, taken off the request"),
    ("reserved_memmb", int, 0, "memory in MB a node keeps for itself, taken off the request, not off the limit"),
    (
        "efa_device_count",
        int,
        None,
        "number of vpc.amazonaws.com/efa devices; default: what the resource says, 0: none",
    ),
)


def parse_options(cfg: Mapping[str, Any]) -> Options:
    """Checks the options of one submission.

    Args:
        cfg: as TorchX gives them, resolved or not; None means "not given".

    Raises:
        OptionError: names the option, its value and what is allowed.
    """
    opts = StrictOpts("kubernetes")
    declare_options(opts)
    given = {name: value for name, value in opts.resolve(cfg).items() if value is not None}
    known = {item.name for item in dataclasses.fields(Options)}
    values = {name: _PARSERS[name](name, value) if name in _PARSERS else value for name, value in given.items()}
    options = Options(**{name: value for name, value in values.items() if name in known})
    _check_together(options)
    return options


def _check_together(options: Options) -> None:
    gang, flavor = options.gang, options.flavor
    if flavor == "volcano" and gang not in ("auto", "volcano"):
        raise OptionError(f"gang={gang} contradicts flavor=volcano, which schedules gangs itself; leave it out", "gang")
    if flavor == "jobset" and gang in ("podgroup", "volcano"):
        raise OptionError(f"gang={gang} is only for flavor=job; with flavor=jobset: none or kueue", "gang")
    if gang == "kueue" and not options.queue:
        raise OptionError("gang=kueue needs queue=NAME, a LocalQueue of Kueue", "queue")
    if gang in ("none", "podgroup") and options.queue:
        raise OptionError(f"queue={options.queue} has no meaning with gang={gang}; with Kueue: gang=kueue", "queue")
    if options.security == "restricted" and options.rdma:
        raise OptionError("rdma needs the right to lock memory, which security=restricted forbids", "rdma")


def _one_of(*allowed: str) -> Any:
    def parse(name: str, value: Any) -> str:
        if value not in allowed:
            raise OptionError(f"{name}={value} is not one of {', '.join(allowed)}", name)
        return str(value)

    return parse


def _matching(pattern: re.Pattern[str], wanted: str) -> Any:
    def parse(name: str, value: Any) -> str:
        if not isinstance(value, str) or pattern.fullmatch(value) is None:
            raise OptionError(f"{name}={value} is not {wanted}", name)
        return value

    return parse


def _parse_count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise OptionError(f"{name}={value} is not a whole number, 0 or more", name)
    return value


def _parse_secrets(name: str, value: Any) -> tuple[str, ...]:
    parse = _matching(syntax.NAME, "the name of a Secret")
    return tuple(parse(name, item) for item in ([value] if isinstance(value, str) else value))


def _parse_selector(name: str, value: Any) -> dict[str, str]:
    for key, wanted in dict(value).items():
        if syntax.LABEL_KEY.fullmatch(key) is None or syntax.LABEL_VALUE.fullmatch(str(wanted)) is None:
            raise OptionError(f"{name}: {key}:{wanted} is not KEY:VALUE of a label", name)
    return {key: str(wanted) for key, wanted in dict(value).items()}


def _parse_tolerations(name: str, value: Any) -> tuple[dict[str, Any], ...]:
    return tuple(_parse_toleration(name, item) for item in ([value] if isinstance(value, str) else value))


def _parse_toleration(name: str, text: str) -> dict[str, Any]:
    """`KEY[:VALUE][:EFFECT][:SECONDS]`; `KEY=VALUE` is understood too, though TorchX's command line cannot carry it."""
    parts = text.replace("=", ":", 1).split(":")
    toleration: dict[str, Any] = {}
    if len(parts) > 2 and parts[-1].isdecimal() and parts[-2] == "NoExecute":
        toleration["tolerationSeconds"] = int(parts.pop())
    if len(parts) > 1 and parts[-1] in EFFECTS:
        toleration["effect"] = parts.pop()
    key, value = parts[0], parts[1] if len(parts) > 1 else None
    if (
        len(parts) > 2
        or syntax.LABEL_KEY.fullmatch(key) is None
        or (value and syntax.LABEL_VALUE.fullmatch(value) is None)
    ):
        raise OptionError(f"{name}: {text!r} is not KEY[:VALUE][:{'|'.join(EFFECTS)}][:SECONDS]", name)
    if value is None:
        return {"key": key, "operator": "Exists", **toleration}
    return {"key": key, "operator": "Equal", "value": value, **toleration}


def _parse_template(name: str, value: Any) -> dict[str, Any]:
    import yaml

    text, source = str(value), "inline"
    if not text.lstrip().startswith("{"):
        source = text
        try:
            text = Path(text).expanduser().read_text()
        except OSError as error:
            raise OptionError(f"{name}={value}: {error.strerror}; give a file or inline JSON", name) from error
    try:
        patch = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise OptionError(f"{name} ({source}) is not YAML: {' '.join(str(error).split())}", name) from error
    if not isinstance(patch, dict) or not patch.keys() <= {"metadata", "spec"}:
        raise OptionError(f"{name} ({source}) must be a mapping with spec and/or metadata, as a Pod has them", name)
    return patch


def _parse_kube_version(name: str, value: Any) -> tuple[int, int]:
    try:
        version = parse_version(str(value))
    except ValueError as error:
        raise OptionError(f"{name}={value} is not a version; for example 1.31", name) from error
    newest = load_table().newest
    if version < (1, 29):
        raise OptionError(f"{VERSION_SENTENCE}; kube_version is {value}", name)
    return min(version, newest)


def _parse_rdma(name: str, value: Any) -> str | None:
    text = str(value)
    if text.lower() in ("false", "no", "0", ""):
        return None
    if text.lower() != "true" and _DEVICE.fullmatch(text) is None:
        raise OptionError(f"{name}={value} is not 'true' or DOMAIN/RESOURCE[:COUNT]; for example rdma/hca:1", name)
    return text


_PARSERS: Final[Mapping[str, Any]] = {
    "namespace": _matching(syntax.LABEL, "a namespace's name"),
    "flavor": _one_of(*FLAVORS),
    "gang": _one_of(*GANGS),
    "agent": _one_of(*AGENTS),
    "security": _one_of(*SECURITIES),
    "image_pull_policy": _one_of(*PULL_POLICIES),
    "queue": _matching(syntax.NAME, "a queue's name"),
    "priority_class": _matching(syntax.NAME, "a PriorityClass' name"),
    "service_account": _matching(syntax.NAME, "a service account's name"),
    "image_pull_secrets": _parse_secrets,
    "node_selector": _parse_selector,
    "tolerations": _parse_tolerations,
    "pod_template": _parse_template,
    "ttl_s": _parse_count,
    "grace_s": _parse_count,
    "reserved_millicpu": _parse_count,
    "reserved_memmb": _parse_count,
    "efa_device_count": _parse_count,
    "shm_size": _matching(syntax.QUANTITY, "a size; for example 16Gi"),
    "rdma": _parse_rdma,
    "kube_version": _parse_kube_version,
}
