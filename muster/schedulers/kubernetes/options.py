"""The adapter's options, `-cfg`: parsed strictly and offline."""

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
    """None: the context's, or the pod's own inside a cluster, or "default"."""
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
    """In Kubernetes' format."""
    pod_template: Mapping[str, Any] | None = None
    ttl_s: int | None = None
    shm_size: str | None = None
    grace_s: int | None = None
    rdma: str | None = None
    """RESOURCE, RESOURCE:COUNT, or "true": no device, only the right to lock memory."""
    gang: str = "auto"
    agent: str = "bundled"
    security: str = "baseline"
    suspend: bool = False
    kube_version: tuple[int, int] | None = None
    """None: the newest known version."""
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
        """`gang` as far as the options decide it; "auto" remains where it depends on the cluster."""
        if self.gang != "auto":
            return self.gang
        if self.flavor == "volcano":
            return "volcano"
        return "kueue" if self.queue else "auto"


def declare_options(opts: StrictOpts) -> None:
    """Declares the options that `torchx runopts kubernetes` lists."""
    for name, type_, default, text in _TABLE:
        opts.add(name, type_=type_, default=default, help=text)


_TABLE: Final[tuple[tuple[str, Any, Any, str], ...]] = (
    ("namespace", str, None, "namespace of the job; default: the context's, else 'default'"),
    ("context", str, None, "context of the kubeconfig; default: the current one"),
    ("kubeconfig", str, None, "path of the kubeconfig; default: $KUBECONFIG, ~/.kube/config, the pod's own account"),
    ("flavor", str, "job", f"one of {', '.join(FLAVORS)}; job needs nothing installed in the cluster"),
    ("queue", str, None, "name of a Kueue LocalQueue (flavor=job, jobset) or of a Volcano queue"),
    ("priority_class", str, None, "PriorityClass of the pods; with Kueue: WorkloadPriorityClass"),
    (
        "service_account",
        str,
        None,
        "service account of the pods; its token is mounted only if pod_template asks for it",
    ),
    ("image_pull_secrets", list[str], None, "names of image pull secrets, separated by ';'"),
    ("image_pull_policy", str, None, f"one of {', '.join(PULL_POLICIES)}; default: Kubernetes' default"),
    ("image_repo", str, None, "registry path to which an image with the workspace is pushed (needs Docker)"),
    ("quiet", bool, False, "with image_repo: do not print the output of the build"),
    ("node_selector", dict[str, str], None, "labels that nodes must have: KEY:VALUE, separated by ';'"),
    ("tolerations", list[str], None, "KEY[:VALUE][:EFFECT][:SECONDS], separated by ';'"),
    ("pod_template", str, None, "patch for the pod template: a file, or inline JSON; our container is 'main'"),
    ("ttl_s", int, None, "seconds from the end of the job until it is deleted; default: never deleted"),
    ("shm_size", str, None, "size of /dev/shm, e.g. 16Gi; default: half the memory limit, or 8Gi without a limit"),
    ("grace_s", int, None, "seconds between SIGTERM and SIGKILL of a pod; default: the agent's shutdown timeout + 15"),
    ("rdma", str, None, "RESOURCE[:COUNT] of RDMA devices, e.g. rdma/hca:1; 'true': only the right to lock memory"),
    ("gang", str, "auto", f"one of {', '.join(GANGS)}; auto: Kueue with a queue, else PodGroups if available"),
    (
        "agent",
        str,
        "bundled",
        "bundled: the agent is sent with the job; image: torchx-muster is installed in the image",
    ),
    ("security", str, "baseline", "baseline, or restricted: pods run as uid 1000, not root, and mount no host paths"),
    ("suspend", bool, False, "create the job suspended"),
    ("kube_version", str, None, "Kubernetes version to check a dry run against, e.g. 1.31; default: the newest known"),
    ("validate_spec", bool, True, "let the cluster check every object (server-side dry run) before any is created"),
    ("reserved_millicpu", int, 0, "CPU reserved for the node, in millicores; subtracted from the request"),
    ("reserved_memmb", int, 0, "memory reserved for the node, in MB; subtracted from the request, not from the limit"),
    ("efa_device_count", int, None, "number of vpc.amazonaws.com/efa devices; default: as in the resource; 0: none"),
)


def parse_options(cfg: Mapping[str, Any]) -> Options:
    """Parses and checks the options of one submission.

    Args:
        cfg: as TorchX passes them, resolved or not; None means "not given".

    Raises:
        OptionError: with the option, its value and what is allowed.
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
        raise OptionError(f"gang={gang} contradicts flavor=volcano, which schedules gangs itself; remove gang", "gang")
    if flavor == "jobset" and gang in ("podgroup", "volcano"):
        raise OptionError(f"gang={gang} cannot be used with flavor=jobset, which allows auto, none or kueue", "gang")
    if gang == "kueue" and not options.queue:
        raise OptionError("gang=kueue needs queue=NAME, the name of a Kueue LocalQueue", "queue")
    if gang in ("none", "podgroup") and options.queue:
        raise OptionError(
            f"queue={options.queue} cannot be used with gang={gang}; for a Kueue queue, set gang=kueue", "queue"
        )
    if options.security == "restricted" and options.rdma:
        raise OptionError("rdma needs the right to lock memory, which security=restricted forbids", "rdma")


def _build_choice_parser(*allowed: str) -> Any:
    def parse(name: str, value: Any) -> str:
        if value not in allowed:
            raise OptionError(f"{name}={value} is not one of {', '.join(allowed)}", name)
        return str(value)

    return parse


def _build_pattern_parser(pattern: re.Pattern[str], expected: str) -> Any:
    def parse(name: str, value: Any) -> str:
        if not isinstance(value, str) or pattern.fullmatch(value) is None:
            raise OptionError(f"{name}={value} is not {expected}", name)
        return value

    return parse


def _parse_count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise OptionError(f"{name}={value} is not a whole number from 0 to {2**31 - 1}", name)
    return value


def _parse_secrets(name: str, value: Any) -> tuple[str, ...]:
    parse = _build_pattern_parser(syntax.NAME, "the name of a Secret")
    return tuple(parse(name, item) for item in ([value] if isinstance(value, str) else value))


def _parse_selector(name: str, value: Any) -> dict[str, str]:
    for key, wanted in dict(value).items():
        if syntax.LABEL_KEY.fullmatch(key) is None or syntax.LABEL_VALUE.fullmatch(str(wanted)) is None:
            raise OptionError(f"{name}: {key}:{wanted} is not a label of the form KEY:VALUE", name)
    return {key: str(wanted) for key, wanted in dict(value).items()}


def _parse_tolerations(name: str, value: Any) -> tuple[dict[str, Any], ...]:
    return tuple(_parse_toleration(name, item) for item in ([value] if isinstance(value, str) else value))


def _parse_toleration(name: str, text: str) -> dict[str, Any]:
    """`KEY[:VALUE][:EFFECT][:SECONDS]`; also `KEY=VALUE`, which TorchX's command line cannot pass."""
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
            raise OptionError(f"{name}={value}: {error.strerror}; pass a file or inline JSON", name) from error
    try:
        patch = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise OptionError(f"{name} ({source}) is not YAML: {' '.join(str(error).split())}", name) from error
    if not isinstance(patch, dict) or not patch.keys() <= {"metadata", "spec"}:
        raise OptionError(f"{name} ({source}) must be a mapping with spec, metadata or both", name)
    return patch


def _parse_kube_version(name: str, value: Any) -> tuple[int, int]:
    try:
        version = parse_version(str(value))
    except ValueError as error:
        raise OptionError(f"{name}={value} is not a Kubernetes version such as 1.31", name) from error
    newest = load_table().newest
    if version < (1, 29):
        raise OptionError(f"{VERSION_SENTENCE}; kube_version is {value}", name)
    return min(version, newest)


def _parse_rdma(name: str, value: Any) -> str | None:
    text = str(value)
    if text.lower() in ("false", "no", "0", ""):
        return None
    if text.lower() != "true" and _DEVICE.fullmatch(text) is None:
        raise OptionError(f"{name}={value} is not 'true' or DOMAIN/RESOURCE[:COUNT], for example rdma/hca:1", name)
    return text


_PARSERS: Final[Mapping[str, Any]] = {
    "namespace": _build_pattern_parser(syntax.LABEL, "the name of a namespace"),
    "flavor": _build_choice_parser(*FLAVORS),
    "gang": _build_choice_parser(*GANGS),
    "agent": _build_choice_parser(*AGENTS),
    "security": _build_choice_parser(*SECURITIES),
    "image_pull_policy": _build_choice_parser(*PULL_POLICIES),
    "queue": _build_pattern_parser(syntax.NAME, "the name of a queue"),
    "priority_class": _build_pattern_parser(syntax.NAME, "the name of a PriorityClass"),
    "service_account": _build_pattern_parser(syntax.NAME, "the name of a service account"),
    "image_pull_secrets": _parse_secrets,
    "node_selector": _parse_selector,
    "tolerations": _parse_tolerations,
    "pod_template": _parse_template,
    "ttl_s": _parse_count,
    "grace_s": _parse_count,
    "reserved_millicpu": _parse_count,
    "reserved_memmb": _parse_count,
    "efa_device_count": _parse_count,
    "shm_size": _build_pattern_parser(syntax.QUANTITY, "a size such as 16Gi"),
    "rdma": _parse_rdma,
    "kube_version": _parse_kube_version,
}
