"""torchrun's module: what programs call of `torch.distributed.run`, with muster's agent below it.

    from muster import run                      # in place of: import torch.distributed.run
    run.main(["--nproc-per-node=4", "train.py"])

The agent is a process of its own under its guard. The parser is torchrun's, with muster's flags added. torch is
imported only for its classes, and for exceptions.
"""

import os
import sys
from argparse import REMAINDER, SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Any

from muster.agent.cli.arguments import parse_ranks, parse_texts
from muster.agent.cli.flag_table import Flag, list_flags, list_groups
from muster.agent.cli.help_text import COMPLETIONS, format_completion
from muster.agent.cli.rendezvous_flags import parse_conf, parse_nnodes
from muster.agent.config import AgentConfig
from muster.elastic.failures import raise_for_outcome
from muster.elastic.jobs.job import Job
from muster.elastic.launcher import split_signals

_DEFAULTS: dict[str, Any] = {
    "nnodes": "1:1",
    "nproc_per_node": "1",
    "rdzv_backend": "static",
    "rdzv_endpoint": "",
    "rdzv_id": "none",
    "rdzv_conf": "",
    "max_restarts": 0,
    "monitor_interval": 0.1,
    "start_method": "spawn",
    "event_log_handler": "null",
    "role": "default",
    "log_line_prefix_template": "",
    "redirects": "0",
    "tee": "0",
    "local_ranks_filter": "",
    "duplicate_stdout_filters": [],
    "duplicate_stderr_filters": [],
    "node_rank": 0,
    "master_addr": "127.0.0.1",
    "signals_to_handle": ",".join(AgentConfig.signals_to_handle),
}
"""torchrun's defaults. All others are None, or False for a switch."""

_TYPES: dict[str, Callable[[str], Any]] = {
    "max_restarts": int,
    "monitor_interval": float,
    "node_rank": int,
    "master_port": int,
    "shutdown_timeout": int,
    "duplicate_stdout_filters": lambda text: list(parse_texts(text)),
    "duplicate_stderr_filters": lambda text: list(parse_texts(text)),
}
_CHOICES = {"start_method": ("spawn", "fork", "forkserver"), "print_completion": tuple(COMPLETIONS)}
_ELASTIC = ("LaunchConfig", "elastic_launch", "DefaultLogsSpecs", "LogsSpecs", "Std", "record")
"""Names that torch's module has from others."""
_FOR_STATIC = ("node_rank", "master_addr", "master_port")
"""torchrun ignores them with other backends, where its namespace has their defaults all the same."""


def __getattr__(name: str) -> Any:
    if name not in _ELASTIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from muster import elastic

    return getattr(elastic, name)


class _FromVariable(Action):
    """A flag whose default is a PET_ variable. A switch has no value."""

    def __init__(self, flag: Flag, **settings: Any) -> None:
        text = os.environ.get(flag.variable) if flag.has_variable else None
        if flag.is_switch:
            super().__init__(nargs=0, default=bool(int(text)) if text else False, **settings)
        else:
            # argparse converts a text default.
            super().__init__(default=text or _DEFAULTS.get(flag.dest), **settings)

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, _option_string: str | None = None
    ) -> None:
        if self.dest == "print_completion":
            print(format_completion(values))
            parser.exit()
        setattr(namespace, self.dest, True if self.nargs == 0 else values)


def get_args_parser() -> ArgumentParser:
    """Return torchrun's parser with muster's flags. The namespace has torchrun's names, types and defaults."""
    parser = ArgumentParser(prog="muster.run", description="Starts the workers of one node of a PyTorch job.")
    for title, flags in list_groups():
        group = parser.add_argument_group(title)
        for flag in flags:
            names = dict.fromkeys((f"--{flag.name}", f"--{flag.dest}"))
            settings: dict[str, Any] = {"dest": flag.dest, "help": flag.text.replace("%", "%%"), "flag": flag}
            if not flag.is_switch:
                settings.update(type=_TYPES.get(flag.dest, str), choices=_CHOICES.get(flag.dest), metavar=flag.metavar)
            group.add_argument(*([f"-{flag.short}"] if flag.short else []), *names, action=_FromVariable, **settings)
    parser.add_argument("training_script", type=str, help="The program: a script, or a module with -m.")
    parser.add_argument("training_script_args", nargs=REMAINDER, help=SUPPRESS)
    return parser


def parse_args(args: Sequence[str] | None) -> Namespace:
    """Parse a command line, or that of this process if `args` is None."""
    return get_args_parser().parse_args(args)


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """Parse `"2"` or `"1:4"` as (minimum, maximum).

    Raises:
        RuntimeError: the text has more than two parts (as torch's).
        ValueError: a part is no number.
    """
    parts = [int(part) for part in nnodes.split(":")]
    if len(parts) > 2:
        raise RuntimeError(f'nnodes={nnodes} is not in "MIN:MAX" format')
    return parts[0], parts[-1]


def determine_local_world_size(nproc_per_node: str) -> int:
    """Return the number of workers on this node, as `--nproc-per-node` gives it: a number, `cpu`, `gpu`, `auto`.

    Raises:
        UsageError: the value is not allowed, or there is no such device. It is a ValueError.
    """
    from muster.agent.placement.device_count import count_workers

    return count_workers(str(nproc_per_node), origin="--nproc-per-node", env=os.environ, python=sys.executable)


def get_rdzv_endpoint(args: Namespace) -> str:
    """Return the endpoint: with the static backend that of the master, if none is given."""
    if args.rdzv_backend != "static" or args.rdzv_endpoint:
        return str(args.rdzv_endpoint)
    return f"{args.master_addr}:{29500 if args.master_port is None else args.master_port}"


def get_use_env(args: Namespace) -> bool:
    """Return False if workers get `--local-rank`, as `torch.distributed.launch` passes it."""
    return bool(getattr(args, "use_env", True))


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a script in this process, as `--run-path` does in a worker."""
    import runpy

    sys.argv = [training_script, *training_script_args]
    runpy.run_path(training_script, run_name="__main__")


def config_from_args(args: Namespace) -> tuple[Any, str | Callable[..., None], list[str]]:
    """Return a `LaunchConfig`, the command or function, and its arguments, as torch's function does. It imports torch.

    The command starts every worker from scratch. `run` starts warm workers.

    Raises:
        UsageError: a value is not allowed. It is a ValueError.
    """
    from muster.elastic import DefaultLogsSpecs, LaunchConfig, Std
    from muster.elastic.flags import PREFIX_VARIABLE

    min_nodes, max_nodes = parse_nnodes(str(args.nnodes), origin="--nnodes")
    static = args.rdzv_backend == "static"
    conf: dict[str, Any] = dict(parse_conf(args.rdzv_conf, origin="--rdzv-conf"))
    ranks = parse_ranks(args.local_ranks_filter, origin="--local-ranks-filter")
    config = LaunchConfig(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc_per_node=determine_local_world_size(args.nproc_per_node),
        run_id=args.rdzv_id,
        role=args.role,
        rdzv_endpoint=get_rdzv_endpoint(args),
        rdzv_backend=args.rdzv_backend,
        rdzv_configs={**conf, "rank": args.node_rank} if static else conf,
        max_restarts=args.max_restarts,
        monitor_interval=args.monitor_interval,
        start_method=args.start_method,
        log_line_prefix_template=getattr(args, "log_line_prefix_template", "") or os.environ.get(PREFIX_VARIABLE),
        local_addr=args.local_addr,
        logs_specs=DefaultLogsSpecs(
            log_dir=args.log_dir,
            redirects=Std.from_str(args.redirects),
            tee=Std.from_str(args.tee),
            local_ranks_filter=set(ranks) if ranks else None,
        ),
        event_log_handler=args.event_log_handler,
        numa_options=_build_numa_options(args.numa_binding),
        signals_to_handle=args.signals_to_handle,
        duplicate_stdout_filters=args.duplicate_stdout_filters,
        duplicate_stderr_filters=args.duplicate_stderr_filters,
        virtual_local_rank=args.virtual_local_rank,
        shutdown_timeout=args.shutdown_timeout,
    )
    return config, *_build_command(args)


def _build_numa_options(binding: str | None) -> Any:
    if binding is None:
        return None
    from torch.numa.binding import AffinityMode, NumaOptions

    return NumaOptions(affinity_mode=AffinityMode(binding))


def _build_command(args: Namespace) -> tuple[str | Callable[..., None], list[str]]:
    script_args = [*_build_rank_argument(args), *args.training_script_args]
    if args.run_path:
        return run_script_path, [args.training_script, *script_args]
    if args.no_python:
        return args.training_script, script_args
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    return python, ["-u", *(["-m"] if args.module else []), args.training_script, *script_args]


def _build_rank_argument(args: Namespace) -> list[str]:
    """Return what torch.distributed.launch adds for scripts that do not read LOCAL_RANK."""
    return [] if get_use_env(args) else ["--local-rank=${local_rank}"]


def run(args: Namespace) -> None:
    """Run one node of a job to its end. Any thread may call it.

    Args:
        args: a namespace of `get_args_parser`. The program may change or leave out attributes.

    Raises:
        ChildFailedError: workers failed and no restart is left (torch's class).
        SignalException: a signal ended the job (torch's class).
        RendezvousTimeoutError: the nodes did not find each other in time (torch's class).
        UsageError: a value is not allowed. It is a ValueError.
        AgentLost: the job's muster process was killed.
    """
    names = getattr(args, "signals_to_handle", None) or _DEFAULTS["signals_to_handle"]
    job = Job(build_flags(args), environ=os.environ, handled_signals=split_signals(names))
    raise_for_outcome(job.run(), name=args.training_script)


def build_flags(args: Namespace) -> list[str]:
    """Return the agent's command line for a namespace."""
    words: list[str] = []
    static = getattr(args, "rdzv_backend", "static") == "static" and not getattr(args, "rdzv_endpoint", "")
    for flag in list_flags():
        value = getattr(args, flag.dest, None)
        if value is None or value is False or value == [] or (value == "" and flag.dest != "role"):
            continue
        if flag.dest in _FOR_STATIC and value == _DEFAULTS.get(flag.dest) and not static:
            continue
        words.append(f"--{flag.name}" if flag.is_switch else f"--{flag.name}={_format(value)}")
    script_args = [*_build_rank_argument(args), *getattr(args, "training_script_args", [])]
    # One `--` is dropped already, and the agent drops another.
    return [*words, args.training_script, *(["--"] if script_args[:1] == ["--"] else []), *script_args]


def _format(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(str(each).replace(",", ",,") for each in value)
    return str(value)


def main(args: Sequence[str] | None = None) -> None:
    """Parse a command line and run it, see `run`."""
    run(parse_args(args))


if __name__ == "__main__":
    from muster.agent.__main__ import main as run_agent

    sys.exit(run_agent())
