"""From torch's configuration objects to the agent's command line: one grammar, and one place that checks values."""

from collections.abc import Mapping
from typing import Any

from muster.agent.errors import UsageError
from muster.elastic.worker_group import has_event_handler

_OWN_BACKENDS = ("muster", "c10d", "static")
PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


def build_flags(config: Any) -> list[str]:
    """Return the agent's flags for a `LaunchConfig`, torch's or ours.

    Raises:
        UsageError: no flag can carry a value. The agent refuses what a flag does not allow.
    """
    flags = [
        f"--nnodes={config.min_nodes}:{config.max_nodes}",
        f"--rdzv-id={config.run_id}",
        *_build_rendezvous_flags(config),
        *build_log_flags(config.logs_specs),
        *build_worker_flags(config),
    ]
    optional = {
        "signals-to-handle": getattr(config, "signals_to_handle", None),
        "shutdown-timeout": getattr(config, "shutdown_timeout", None),
    }
    return [*flags, *(f"--{name}={value}" for name, value in optional.items() if value is not None and value != "")]


def build_worker_flags(config: Any) -> list[str]:
    """Return the flags for the fields that a `LaunchConfig` and a `WorkerSpec` have in common."""
    nproc = getattr(config, "nproc_per_node", None) or config.local_world_size
    events = getattr(config, "event_log_handler", None) or "null"  # the agent refuses unknown ones
    named = {
        "nproc-per-node": nproc,
        "role": config.role,
        "max-restarts": config.max_restarts,
        "monitor-interval": config.monitor_interval,
        "local-addr": getattr(config, "local_addr", None) or None,
        "event-log-handler": None if has_event_handler(events) else events,
        "duplicate-stdout-filters": _join_texts(getattr(config, "duplicate_stdout_filters", None)),
        "duplicate-stderr-filters": _join_texts(getattr(config, "duplicate_stderr_filters", None)),
        "numa-binding": _name_binding(getattr(config, "numa_options", None)),
    }
    flags = [f"--{name}={value}" for name, value in named.items() if value is not None]
    return [*flags, *(["--virtual-local-rank"] if getattr(config, "virtual_local_rank", False) else [])]


def _build_rendezvous_flags(config: Any) -> list[str]:
    backend = config.rdzv_backend
    flags = [f"--rdzv-backend={backend}"]
    conf: dict[str, Any] = dict(config.rdzv_configs)
    if backend in _OWN_BACKENDS and "rank" in conf:
        flags.append(f"--node-rank={conf.pop('rank')}")
    if config.rdzv_endpoint and not _is_any_local_port(config):
        flags.append(f"--rdzv-endpoint={config.rdzv_endpoint}")
    pairs = [f"{key}={value}" for key, value in conf.items()]
    if any("," in pair for pair in pairs):
        raise UsageError(f"rdzv_configs={config.rdzv_configs!r}: a value with a comma cannot be passed on")
    return [*flags, *([f"--rdzv-conf={','.join(pairs)}"] if pairs else [])]


def _is_any_local_port(config: Any) -> bool:
    """Return whether it is `localhost:0`, which programs pass to torch's c10d if there is one node."""
    return bool(config.rdzv_backend in ("muster", "c10d") and config.max_nodes == 1)


def build_log_flags(specs: Any) -> list[str]:
    """Return the flags for torch's `DefaultLogsSpecs`. None: the agent's own choice.

    Raises:
        UsageError: it has a layout of its own, which the agent, another process, cannot ask for.
    """
    if specs is None:
        return []
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs

    if type(specs).reify is not DefaultLogsSpecs.reify:
        raise UsageError(
            f"logs_specs={specs!r}: only DefaultLogsSpecs can be given as an object; register {type(specs).__name__} "
            "as a torchrun.logs_specs entry point, and name it with muster.run's --logs-specs"
        )
    ranks = specs._local_ranks_filter  # noqa: SLF001  # torch has no public name for what it was made with
    flags = {
        "log-dir": specs._root_log_dir,  # noqa: SLF001
        "redirects": format_std(specs._redirects),  # noqa: SLF001
        "tee": format_std(specs._tee),  # noqa: SLF001
        "local-ranks-filter": ",".join(map(str, sorted(ranks))) if ranks else None,
    }
    return [f"--{name}={value}" for name, value in flags.items() if value]


def format_std(choice: Any) -> str:
    """Return a text such as `3`, or `0:3,1:1`."""
    if isinstance(choice, Mapping):
        return ",".join(f"{rank}:{int(std)}" for rank, std in choice.items())
    return str(int(choice))


def _join_texts(texts: list[str] | None) -> str | None:
    return ",".join(text.replace(",", ",,") for text in texts) if texts else None


def _name_binding(options: Any) -> str | None:
    return None if options is None else str(getattr(options.affinity_mode, "value", options.affinity_mode))
