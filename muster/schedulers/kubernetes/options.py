"""The adapter's options, `-cfg`: each declared once, parsed strictly and offline."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from muster._shared.foreign_files import read_whole
from muster.schedulers.errors import OptionError
from muster.schedulers.kubernetes import kube
from muster.schedulers.kubernetes.schema import MINIMUM, VERSION_SENTENCE, load_table, parse_version
from muster.schedulers.runner import option_records
from muster.schedulers.runner.option_parsing import StrictOpts
from muster.schedulers.runner.option_records import (
    DRYRUN,
    GRACE_S,
    QUIET,
    build_choice_parser,
    build_pattern_parser,
    option,
    parse_count,
    parse_positive,
)

FLAVORS: Final = ("job", "jobset")
GANGS: Final = ("auto", "none", "kueue", "podgroup", "volcano")
KUEUE_ELASTICS: Final = ("resize", "partial")
AGENTS: Final = ("bundled", "image")
SECURITIES: Final = ("baseline", "restricted")
PULL_POLICIES: Final = ("Always", "IfNotPresent", "Never")
_DEVICE: Final = re.compile(rf"{kube.DEVICE_NAME.pattern}(:[1-9]\d*)?", re.ASCII)
EFFECTS: Final = ("NoSchedule", "PreferNoSchedule", "NoExecute")

# -- parsers ----------------------------------------------------------------------------------------------------------


def _parse_secrets(name: str, value: Any) -> tuple[str, ...]:
    parse = build_pattern_parser(kube.OBJECT_NAME, "the name of a Secret")
    return tuple(parse(name, item) for item in ([value] if isinstance(value, str) else value))


def _parse_selector(name: str, value: Any) -> dict[str, str]:
    for key, wanted in dict(value).items():
        if kube.LABEL_KEY.fullmatch(key) is None or kube.LABEL_VALUE.fullmatch(str(wanted)) is None:
            raise OptionError(f"{name}: '{key}:{wanted}' is not a label of the form KEY:VALUE", name)
    return {key: str(wanted) for key, wanted in dict(value).items()}


def _parse_labels(name: str, value: Any) -> dict[str, str]:
    labels = _parse_selector(name, value)
    for key in labels:
        if kube.is_reserved(key):
            raise OptionError(f"{name}: {key} cannot be set: muster or a controller of Kubernetes sets it", name)
    return labels


def _parse_tolerations(name: str, value: Any) -> tuple[dict[str, Any], ...]:
    return tuple(_parse_toleration(name, item) for item in ([value] if isinstance(value, str) else value))


def _parse_toleration(name: str, text: str) -> dict[str, Any]:
    """Parse `KEY[:VALUE][:EFFECT][:SECONDS]`, or `KEY=VALUE` as kubectl has it."""
    parts = text.replace("=", ":", 1).split(":")
    toleration: dict[str, Any] = {}
    if len(parts) > 2 and parts[-1].isdecimal() and parts[-2] == "NoExecute":
        toleration["tolerationSeconds"] = int(parts.pop())
    if len(parts) > 1 and parts[-1] in EFFECTS:
        toleration["effect"] = parts.pop()
    key, value = parts[0], parts[1] if len(parts) > 1 else None
    if len(parts) > 2 or kube.LABEL_KEY.fullmatch(key) is None or (value and kube.LABEL_VALUE.fullmatch(value) is None):
        raise OptionError(f"{name}: {text!r} is not KEY[:VALUE][:{'|'.join(EFFECTS)}][:SECONDS]", name)
    if value == "":
        given = ":".join([key, *text.replace("=", ":", 1).split(":")[2:]])
        raise OptionError(f"{name}: {text!r} has an empty value; {given!r} tolerates every value of {key}", name)
    if value is None:
        return {"key": key, "operator": "Exists", **toleration}
    return {"key": key, "operator": "Equal", "value": value, **toleration}


def _parse_template(name: str, value: Any) -> dict[str, Any]:
    import yaml

    text, source = str(value), "inline"
    if not text.lstrip().startswith("{"):
        source = text
        try:
            text = read_whole(os.path.expanduser(text)).decode()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise OptionError(f"{name}={value}: {why}; pass a file or inline JSON", name) from error
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
    if version < MINIMUM:
        raise OptionError(f"{VERSION_SENTENCE}; kube_version is {value}", name)
    return min(version, load_table().newest)


def _parse_rdma(name: str, value: Any) -> str | None:
    text = str(value)
    if text.lower() in ("false", "no", "0", ""):
        return None
    if text.lower() != "true" and _DEVICE.fullmatch(text) is None:
        raise OptionError(f"{name}={value} is not 'true' or DOMAIN/RESOURCE[:COUNT], for example rdma/hca:1", name)
    return text


@dataclass(frozen=True, kw_only=True)
class User:
    """The user of the pods' processes, never root."""

    uid: int | None
    """None: the image's."""
    gid: int
    """Also of the volumes (`fsGroup`)."""


DEFAULT_USER: Final = User(uid=1000, gid=1000)
"""With security=restricted: any user except root."""

_USER: Final = re.compile(r"([1-9][0-9]{0,9})(?::([1-9][0-9]{0,9}))?")
_USER_LIMIT: Final = 2**31 - 1


def _parse_user(name: str, value: Any) -> User:
    if value == "image":
        return User(uid=None, gid=DEFAULT_USER.gid)
    match = _USER.fullmatch(str(value))
    uid, gid = (int(text) for text in (match[1], match[2] or match[1])) if match else (0, 0)
    if not match or max(uid, gid) > _USER_LIMIT:
        raise OptionError(f"{name}={value!r} is not 'image', UID or UID:GID with numbers from 1 to {_USER_LIMIT}", name)
    return User(uid=uid, gid=gid)


# -- the options ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Options:
    """One submission's options, checked. `torchx runopts kubernetes` lists them."""

    namespace: str | None = option(
        str,
        "namespace of the job; default: the context's, else 'default'",
        parse=build_pattern_parser(kube.NAMESPACE_NAME, "the name of a namespace"),
    )
    context: str | None = option(str, "context of the kubeconfig; default: the current one")
    kubeconfig: str | None = option(
        str, "path of the kubeconfig; default: $KUBECONFIG, ~/.kube/config, the pod's own account"
    )
    flavor: str = option(
        str,
        f"one of {', '.join(FLAVORS)}; job needs nothing installed in the cluster",
        default="job",
        parse=build_choice_parser(*FLAVORS),
    )
    queue: str | None = option(
        str,
        "name of a Kueue LocalQueue; with gang=volcano, of a Volcano queue",
        parse=build_pattern_parser(kube.OBJECT_NAME, "the name of a queue"),
    )
    priority_class: str | None = option(
        str,
        "PriorityClass of the pods; with Kueue: WorkloadPriorityClass",
        parse=build_pattern_parser(kube.OBJECT_NAME, "the name of a PriorityClass"),
    )
    service_account: str | None = option(
        str,
        "service account of the pods; its token is mounted only with events=true, or if pod_template asks for it",
        parse=build_pattern_parser(kube.OBJECT_NAME, "the name of a service account"),
    )
    image_pull_secrets: tuple[str, ...] = option(
        list[str], "names of image pull secrets, separated by ';'", parse=_parse_secrets, absent=()
    )
    image_pull_policy: str | None = option(
        str,
        f"one of {', '.join(PULL_POLICIES)}; default: Kubernetes' default",
        parse=build_choice_parser(*PULL_POLICIES),
    )
    image_repo: str | None = option(str, "registry path to which an image with the workspace is pushed (needs Docker)")
    quiet: bool = QUIET.as_field()
    node_selector: Mapping[str, str] = option(
        dict[str, str], "labels that nodes must have: KEY:VALUE, separated by ';'", parse=_parse_selector, absent={}
    )
    labels: Mapping[str, str] = option(
        dict[str, str],
        "labels of the job's objects and pods: KEY:VALUE, separated by ';'",
        parse=_parse_labels,
        absent={},
    )
    tolerations: tuple[Mapping[str, Any], ...] = option(
        list[str], "KEY[:VALUE][:EFFECT][:SECONDS], separated by ';'", parse=_parse_tolerations, absent=()
    )
    """In Kubernetes' format."""
    pod_template: Mapping[str, Any] | None = option(
        str, "patch for the pod template: a file, or inline JSON; muster's container is 'main'", parse=_parse_template
    )
    ttl_s: int | None = option(
        int,
        "seconds from the end of the job until it is deleted (ttlSecondsAfterFinished); default: never deleted",
        parse=parse_count,
    )
    deadline_s: int | None = option(
        int,
        "seconds from the start of the job until its pods get SIGTERM and it has FAILED (activeDeadlineSeconds); a "
        "wait for nodes counts, a wait in a Kueue queue does not; default: no limit",
        parse=parse_positive,
    )
    shm_size: str | None = option(
        str,
        "size of /dev/shm, e.g. 16Gi; default: half the memory limit, or 8Gi without a limit",
        parse=build_pattern_parser(kube.QUANTITY, "a size such as 16Gi"),
    )
    compile_cache: str | None = option(
        str,
        "a claim, or a folder of the nodes (/PATH), for the caches of TorchInductor, Triton and CUDA, which then "
        "outlive the pods; default: they end with the pod",
        parse=build_pattern_parser(kube.CACHE_PLACE, "the name of a claim, or an absolute path"),
    )
    grace_s: float | None = GRACE_S.as_field()
    rdma: str | None = option(
        str,
        "RESOURCE[:COUNT] of RDMA devices, e.g. rdma/hca:1; 'true': only the right to lock memory",
        parse=_parse_rdma,
    )
    """RESOURCE, RESOURCE:COUNT, or "true": no device, only the right to lock memory."""
    gang: str = option(
        str,
        f"one of {', '.join(GANGS)}; auto: kueue with a queue, else podgroup if the cluster has it, else none",
        default="auto",
        parse=build_choice_parser(*GANGS),
    )
    kueue_elastic: str | None = option(
        str,
        "elastic jobs in a Kueue queue (flavor=job). resize (default): the job starts with MAX nodes, and can be "
        "resized if Kueue has ElasticJobsViaWorkloadSlices. partial: it starts with as many of MIN:MAX nodes as the "
        "queue has room for, and cannot be resized",
        parse=build_choice_parser(*KUEUE_ELASTICS),
    )
    agent: str = option(
        str,
        "bundled: the agent is sent with the job; image: torchx-muster is installed in the image",
        default="bundled",
        parse=build_choice_parser(*AGENTS),
    )
    events: bool = option(
        bool,
        "the job's agent writes failures, hangs and progress as Events and annotations of its Job. This mounts the "
        "token of the pods' service account, which needs the rights for it",
        default=False,
    )
    pod_monitor: bool = option(
        bool,
        "create a PodMonitor, so that the Prometheus operator reads the metrics; needs --metrics_port PORT of the "
        "component, and the operator in the cluster",
        default=False,
    )
    readiness: bool = option(
        bool,
        "a pod is ready while its workers run (a probe of /readyz); needs --metrics_port PORT of the component",
        default=False,
    )
    security: str = option(
        str,
        "baseline, or restricted: pods do not run as root, see run_as, and mount no host paths",
        default="baseline",
        parse=build_choice_parser(*SECURITIES),
    )
    run_as: User | None = option(  # noqa: RUF009  # it makes a field
        str,
        "UID[:GID] of the pods' processes, never root, or 'image' for the image's user; default: 1000 with "
        "security=restricted, else as the image says",
        parse=_parse_user,
    )
    suspend: bool = option(bool, "create the job suspended", default=False)
    kube_version: tuple[int, int] | None = option(
        str,
        "Kubernetes version to check a dry run against, e.g. 1.31; default: the newest known",
        parse=_parse_kube_version,
    )
    validate_spec: bool = option(
        bool, "let the cluster check every object (server-side dry run) before any is created", default=True
    )
    reserved_millicpu: int = option(
        int,
        "CPU reserved for the node, in millicores; subtracted from the request",
        default=0,
        parse=parse_count,
    )
    reserved_memmb: int = option(
        int,
        "memory reserved for the node, in MB; subtracted from the request, not from the limit",
        default=0,
        parse=parse_count,
    )
    efa_device_count: int | None = option(
        int,
        "number of vpc.amazonaws.com/efa devices; default: as in the resource; 0: none",
        parse=parse_count,
    )
    dryrun: str = DRYRUN.as_field()

    @property
    def schema_version(self) -> tuple[int, int]:
        """The version that documents are checked against."""
        return self.kube_version or load_table().newest

    @property
    def user(self) -> User | None:
        """The user of the pods' processes. None: the image decides, and may choose root."""
        return self.run_as or (DEFAULT_USER if self.security == "restricted" else None)

    @property
    def resolved_gang(self) -> str:
        """`gang` as far as the options decide it. "auto" remains where it depends on the cluster."""
        return "kueue" if self.gang == "auto" and self.queue else self.gang


def parse_options(cfg: Mapping[str, Any]) -> Options:
    """Parse and check the options of one submission.

    Args:
        cfg: as TorchX passes them, resolved or not. None means "not given".

    Raises:
        OptionError: with the option, its value and what is allowed.
    """
    opts = StrictOpts("kubernetes")
    option_records.declare_options(opts, Options)
    options = option_records.parse_options(Options, opts, cfg)
    _check_together(options)
    return options


def _check_together(options: Options) -> None:
    gang, flavor = options.gang, options.flavor
    if flavor == "jobset" and gang in ("podgroup", "volcano"):
        raise OptionError(f"gang={gang} cannot be used with flavor=jobset, which allows auto, none or kueue", "gang")
    if gang == "kueue" and not options.queue:
        raise OptionError("gang=kueue needs queue=NAME, the name of a Kueue LocalQueue", "queue")
    if gang in ("none", "podgroup") and options.queue:
        raise OptionError(
            f"queue={options.queue} cannot be used with gang={gang}; for a Kueue queue, set gang=kueue", "queue"
        )
    if options.kueue_elastic and (options.resolved_gang != "kueue" or flavor != "job"):
        raise OptionError(
            f"kueue_elastic={options.kueue_elastic} is for flavor=job in a Kueue queue: give queue=NAME, or remove it",
            "kueue_elastic",
        )
    if options.security == "restricted" and options.rdma:
        raise OptionError("rdma needs the right to lock memory, which security=restricted forbids", "rdma")
