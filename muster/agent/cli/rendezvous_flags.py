"""From flags to `RendezvousConfig`: which backend is used, where the leader is, and what torch's keys mean here."""

import os
from collections.abc import Mapping
from functools import partial
from typing import Final

from muster._shared.contract import (
    DEFAULT_RDZV_PORT,
    DEFAULT_RUN_ID,
    RDZV_CONF_KEYS,
    RDZV_CONF_WITHOUT_EFFECT,
    SIZE_LIMIT,
    Env,
    parse_digits,
)
from muster.agent.cli.command_line import COUNT_LIMIT, FlagValues, describe_seconds, parse_seconds, read_variable
from muster.agent.config import HANG_TIMEOUT_AUTO, RendezvousConfig, read_token
from muster.agent.errors import UsageError

_PORT_LIMIT: Final = 65535
_STATIC_PORT: Final = 29500
_STATIC_TIMEOUT_S: Final = 900.0
_OURS: Final = ("muster", "c10d")
_TORCHS: Final = ("c10d-torch", "etcd", "etcd-v2")
_CALLERS: Final = "caller"
"""For programs that start an agent (see `muster.elastic`), not for people."""
_TRUE: Final = ("1", "true", "t", "yes", "y")
_FALSE: Final = ("0", "false", "f", "no", "n")

_HANG_ACTIONS = ("report", "restart", "stop")
_RANK_ORDERS = ("node", "segment")


def build_rendezvous_config(
    values: FlagValues, environ: Mapping[str, str], *, host_name: str, stop_limit_s: float
) -> RendezvousConfig:
    """Build the rendezvous configuration: where and how this node joins the others.

    Args:
        values: the flags.
        environ: the agent's environment, for the variables that adapters set and the one --rank0-env names.
        host_name: this machine's, which is node 0's address if no address is given.
        stop_limit_s: the most time that this node takes to stop its workers.

    Raises:
        UsageError: a value is not allowed, flags contradict each other, or the token is missing.
    """
    nnodes = values.text("nnodes")
    min_nodes, max_nodes = parse_nnodes("1" if nnodes is None else nnodes, origin=values.origin("nnodes"))
    backend = _choose_backend(values, max_nodes)
    standalone = backend == "standalone"
    if standalone and min_nodes > 1:
        raise UsageError(f"--standalone is one node, but {values.origin('nnodes')} is {values.text('nnodes')!r}")
    if standalone:
        min_nodes = max_nodes = 1
    elif backend == "static":
        min_nodes = max_nodes  # all, as with torchrun
    node_index = _choose_node_index(values, backend, max_nodes)
    host, port = _find_leader(values, environ, backend=backend, node_index=node_index, host_name=host_name)
    host = host.strip("[]")  # of an IPv6 address
    is_torchs = backend not in ("static", "muster", "standalone")
    endpoint = _name_endpoint(values, host, port) if is_torchs else f"{host}:{port}"
    if endpoint.endswith(":0") and max_nodes > 1 and (backend in _TORCHS or not is_torchs):
        raise UsageError(f"{endpoint}: the port must be 1 to {_PORT_LIMIT} with more than one node")
    conf, read = _read_conf(values, is_torchs=is_torchs)
    is_host = read.truth("is_host")
    default_join_s = _STATIC_TIMEOUT_S if backend == "static" else 600.0
    return RendezvousConfig(
        backend="muster" if standalone else backend,
        run_id=_choose_run_id(values, standalone=standalone),
        host=None if standalone else host,
        port=0 if standalone else port,
        node_index=node_index,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        standalone=standalone or (max_nodes == 1 and (backend == "muster" or (backend == "static" and not port))),
        listen_fd=None if backend == "static" else _read_listen_fd(environ),
        has_stock_host=values.is_given("rank0-env") and node_index == 0 and Env.RDZV_PORT not in environ,
        is_by_hand=Env.ADAPTER not in environ,
        local_addr=(values.text("local-addr") or "").strip("[]") or None,
        token=read_token(environ),
        max_restarts=values.integer("max-restarts") or 0,
        hang_action=_choose_hang_action(values),
        max_restarts_flag="--max_retries" if environ.get(Env.ADAPTER) else "--max-restarts",
        policy=_parse_policy(values),
        segment=_find_segment(values, environ, backend=backend),
        machine=_read_machine(),
        machine_name=environ.get(Env.MACHINE_NAME, ""),
        join_timeout_s=read.seconds("join_timeout", read.seconds("timeout", default_join_s)),
        last_call_timeout_s=_choose_last_call_s(values, environ, read),
        keep_alive_interval_s=read.seconds("keep_alive_interval", RendezvousConfig.keep_alive_interval_s),
        keep_alive_max_attempt=read.count("keep_alive_max_attempt", RendezvousConfig.keep_alive_max_attempt),
        incarnation=_read_incarnation(environ),
        stop_limit_s=stop_limit_s,
        is_host=None if backend == "static" else is_host,
        endpoint=endpoint if is_torchs else "",
        conf=conf,
        control_fd=int(environ[Env.CONTROL_FD]) if backend == _CALLERS and Env.CONTROL_FD in environ else None,
        master_addr=host if backend == "static" else "127.0.0.1",
        master_port=port if backend == "static" else _STATIC_PORT,
    )


def _parse_policy(values: FlagValues) -> str:
    """Refuse rules that cannot be parsed, because it is too late when they are needed."""
    text = values.text("on")
    if not text:
        return ""
    from muster._shared.policy import PolicyError, parse_policy

    try:
        parse_policy(text)
    except PolicyError as error:
        raise UsageError(f"--on {error}") from error
    return text


def _read_machine() -> str:
    """Return the boot id, which containers on one machine have in common; "" where there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(64).strip()
    except (OSError, ValueError):
        return ""


def _read_conf(values: FlagValues, *, is_torchs: bool) -> "tuple[dict[str, str], _ConfReader]":
    """Return the keys and values of --rdzv-conf, and a reader of ours; torch's backends read theirs themselves."""
    origin = values.origin("rdzv-conf")
    conf = parse_conf(values.text("rdzv-conf") or "", origin=origin)
    if not is_torchs:
        _refuse_unknown_keys(conf, origin=origin)
    return conf, _ConfReader({} if is_torchs else conf, origin)


def _choose_node_index(values: FlagValues, backend: str, max_nodes: int) -> int | None:
    """Return the node's index; None if the leader gives this node its place."""
    index = values.integer("node-rank", maximum=SIZE_LIMIT - 1)
    if index is None:
        return 0 if backend in ("standalone", "static") else None
    is_alone = backend == "standalone" and not values.switch("standalone")  # with which torchrun ignores it
    if (backend == "static" or is_alone) and index >= max_nodes:  # ours treats it as a spare
        raise UsageError(
            f"{values.origin('node-rank')} {index}: must be 0 to {max_nodes - 1} with --nnodes {max_nodes}"
        )
    return index


def parse_nnodes(text: str, *, origin: str) -> tuple[int, int]:
    """Parse `2`, or `1:4` for an elastic job.

    Raises:
        UsageError: it is neither, MIN is less than 1, or MIN is more than MAX.
    """
    ends = text.split(":")
    low, high = parse_digits(ends[0], SIZE_LIMIT), parse_digits(ends[-1], SIZE_LIMIT)
    if len(ends) > 2 or not low or not high or low > high:
        raise UsageError(f"{origin} {text!r}: must be N or MIN:MAX, with 1 <= MIN <= MAX <= {SIZE_LIMIT}")
    return low, high


def parse_endpoint(text: str, *, default_port: int, origin: str) -> tuple[str, int]:
    """Parse `host`, `host:port`, `[::1]` or `[::1]:port`.

    Raises:
        UsageError: anything else, or an invalid port.
    """
    text = text.strip()
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        well_formed = bool(bracket) and (not rest or rest.startswith(":"))
        colon, port = rest[:1], rest[1:]
    else:
        host, colon, port = text.partition(":")
        well_formed = ":" not in port
    if not (well_formed and host and not set(host) & set(" /,@[]")):
        raise UsageError(f"{origin} {text!r}: must be HOST or HOST:PORT, an IPv6 address in brackets")
    if not colon:
        return host, default_port
    number = parse_digits(port, _PORT_LIMIT)
    if number is None:
        raise UsageError(f"{origin} {text!r}: the port must be a number from 0 to {_PORT_LIMIT}")
    return host, number


def parse_conf(text: str, *, origin: str) -> dict[str, str]:
    """Parse `key=value,key=value`, even within quotes that no shell has removed, as in a Kubernetes manifest.

    Raises:
        UsageError: a key without a value, or a value without a key.
    """
    conf: dict[str, str] = {}
    pairs = text.strip()
    if len(pairs) > 1 and pairs[0] == pairs[-1] and pairs[0] in "'\"":
        pairs = pairs[1:-1]
    for pair in pairs.split(",") if pairs.strip() else ():
        key, _, value = (part.strip() for part in pair.partition("="))
        if not (key and value):
            raise UsageError(f"{origin} {text!r}: must be KEY=VALUE,KEY=VALUE,..., not {pair!r}")
        conf[key] = value
    return conf


def _choose_backend(values: FlagValues, max_nodes: int) -> str:
    """Return `muster`, `static`, `standalone` or the name of one of torch's handlers."""
    if values.switch("standalone"):
        return "standalone"
    named = values.text("rdzv-backend")
    if named is None and (values.is_given("rank0-env") or values.is_given("rdzv-port")):
        return "muster"
    if named is None or named == "static":
        placed = values.text("rdzv-endpoint") or any(map(values.is_given, ("master-port", "rank0-env", "rdzv-port")))
        return "static" if placed or max_nodes > 1 else "standalone"
    if named in _OURS:
        return "muster"
    if named not in (*_TORCHS, _CALLERS) and named not in _list_handlers():
        allowed = ("muster", "c10d", "static", *_TORCHS, *_list_handlers())
        raise values.build_error("rdzv-backend", "one of " + ", ".join(dict.fromkeys(allowed)))
    return named


def _list_handlers() -> list[str]:
    from muster._shared.programs import find_entry_points

    return sorted(find_entry_points("torchrun.handlers"))


def _find_leader(
    values: FlagValues, environ: Mapping[str, str], *, backend: str, node_index: int | None, host_name: str
) -> tuple[str, int]:
    """Return the leader's (static: the master's) host and port. The command line overrides PET_ variables."""
    endpoint = values.text("rdzv-endpoint")
    variable = values.text("rank0-env")
    if variable is not None and values.is_on_command_line("rdzv-endpoint"):
        raise UsageError("--rank0-env and --rdzv-endpoint both give the leader's address; use one of them")
    if backend == "static" and not endpoint and variable is None:
        port = values.integer("master-port", maximum=_PORT_LIMIT)
        return values.text("master-addr") or "127.0.0.1", _STATIC_PORT if port is None else port
    port = _choose_port(values, environ, backend)
    if variable is not None:
        return _look_up_host(variable, environ, node_index=node_index, host_name=host_name), port
    if endpoint and backend in ("muster", "static"):
        if backend == "static" and not endpoint.rpartition("]")[2].count(":"):
            raise UsageError(f"{values.origin('rdzv-endpoint')} {endpoint!r}: static needs HOST:PORT")
        return parse_endpoint(endpoint, default_port=port, origin=values.origin("rdzv-endpoint"))
    return "localhost", port


def _choose_port(values: FlagValues, environ: Mapping[str, str], backend: str) -> int:
    """Return the port. Our leader's is the one that the adapter had to choose, where it did."""
    port = values.integer("rdzv-port", maximum=_PORT_LIMIT)
    own = DEFAULT_RDZV_PORT if port is None else port
    if backend != "muster":
        return own
    parse, allowed = partial(parse_digits, most=_PORT_LIMIT), f"a port from 0 to {_PORT_LIMIT}"
    return read_variable(environ, Env.RDZV_PORT, own, parse, allowed)


def _look_up_host(variable: str, environ: Mapping[str, str], *, node_index: int | None, host_name: str) -> str:
    host = environ.get(variable, "").strip()
    if host:
        return host
    if node_index == 0:
        return host_name  # not node 0's own address on AWS Batch
    raise UsageError(
        f"--rank0-env {variable}: this variable must hold the address of node 0, but it is "
        f"{'empty' if variable in environ else 'not set'} on this node"
        + (" (and --node-rank is not given)" if node_index is None else f" (index {node_index})")
    )


def _name_endpoint(values: FlagValues, host: str, port: int) -> str:
    """Return the endpoint for torch's handlers: as given, or built from --rank0-env and --rdzv-port."""
    text = values.text("rdzv-endpoint")
    if values.is_given("rank0-env") or (values.is_given("rdzv-port") and not text):
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return text or ""


def _choose_run_id(values: FlagValues, *, standalone: bool) -> str:
    text = values.text("rdzv-id")
    if text:
        return text
    if text is not None and not standalone:
        raise values.build_error("rdzv-id", "a name that is the same on all nodes")
    return os.urandom(8).hex() if standalone else DEFAULT_RUN_ID


def _refuse_unknown_keys(conf: Mapping[str, str], *, origin: str) -> None:
    known = (*RDZV_CONF_KEYS, *RDZV_CONF_WITHOUT_EFFECT)
    for key in conf:
        if key not in known:
            raise UsageError(f"{origin}: unknown key {key!r}; the keys are {', '.join(known)}")
    if conf.get("store_type", "tcp") != "tcp":
        raise UsageError(
            f"{origin} store_type={conf['store_type']}: must be tcp; other stores need --rdzv-backend c10d-torch"
        )


def _choose_last_call_s(values: FlagValues, environ: Mapping[str, str], read: "_ConfReader") -> float:
    flag_s = values.seconds("last-call-timeout", zero=True)
    if flag_s is not None:
        return flag_s
    allowed, parse = describe_seconds(zero=True), partial(parse_seconds, zero=True)
    adapter_s = read_variable(environ, Env.LAST_CALL_S, RendezvousConfig.last_call_timeout_s, parse, allowed)
    return read.seconds("last_call_timeout", adapter_s, zero=True)


def _read_listen_fd(environ: Mapping[str, str]) -> int | None:
    if not environ.get(Env.RDZV_FD):
        return None
    return read_variable(environ, Env.RDZV_FD, 0, _parse_count, "the number of an inherited descriptor")


def _read_incarnation(environ: Mapping[str, str]) -> int:
    allowed = "how often this node was started before, 0 or more"
    return read_variable(environ, Env.INCARNATION, 0, _parse_count, allowed)


def _parse_count(text: str) -> int | None:
    return parse_digits(text, COUNT_LIMIT)


class _ConfReader:
    """Reads typed values from --rdzv-conf."""

    def __init__(self, conf: Mapping[str, str], origin: str) -> None:
        self._conf = conf
        self._origin = origin

    def seconds(self, key: str, default: float, *, zero: bool = False) -> float:
        text = self._conf.get(key)
        number = default if text is None else parse_seconds(text, zero=zero)
        if number is None:
            raise self._build_error(key, describe_seconds(zero=zero))
        return number

    def count(self, key: str, default: int) -> int:
        number = parse_digits(self._conf.get(key, str(default)), COUNT_LIMIT)
        if not number:
            raise self._build_error(key, "a whole number, at least 1")
        return number

    def truth(self, key: str) -> bool | None:
        text = self._conf.get(key)
        if text is None:
            return None
        if text.lower() not in (*_TRUE, *_FALSE):
            raise self._build_error(key, "one of " + ", ".join((*_TRUE, *_FALSE)))
        return text.lower() in _TRUE

    def _build_error(self, key: str, allowed: str) -> UsageError:
        return UsageError(f"{self._origin} {key}={self._conf[key]}: must be {allowed}")


# -- hangs ------------------------------------------------------------------------------------------------------------


def parse_hang_timeout_s(values: FlagValues) -> float | None:
    """Return the seconds, `HANG_TIMEOUT_AUTO` for auto, or None for off.

    Raises:
        UsageError: it is neither.
    """
    text = values.text("hang-timeout")
    if text is None or text == "auto":
        return HANG_TIMEOUT_AUTO
    number = parse_seconds(text, zero=True)
    if number is None:
        raise values.build_error("hang-timeout", f"auto, or {describe_seconds(zero=True)}")
    return number or None


def _find_segment(values: FlagValues, environ: Mapping[str, str], *, backend: str) -> str | None:
    if values.choice("rank-order", _RANK_ORDERS) != "segment":
        return None
    if backend != "muster":
        raise UsageError(f"--rank-order segment needs the rendezvous backend muster, not {backend}")
    from muster.agent.placement.segments import find_segment

    return find_segment(environ)


def _choose_hang_action(values: FlagValues) -> str:
    action = values.choice("hang-action", _HANG_ACTIONS)
    if action is not None and parse_hang_timeout_s(values) is None:
        raise UsageError(f"--hang-action {action} has no effect with --hang-timeout 0, which means never")
    return action or ("report" if parse_hang_timeout_s(values) == HANG_TIMEOUT_AUTO else "restart")
