"""The agent's command line: flags and environment in, one `AgentConfig` out. The only place that reads variables.

Flags, abbreviations and PET_* variables are torchrun's with torchrun's meaning, plus a few of ours; `flag_table` lists
them all. Nothing here acts: cores, devices and entry points are looked up only if a flag asks for them.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NoReturn

from muster import __version__
from muster._shared.contract import (
    COLLAPSED_FROM_RANKS,
    DEFAULT_DRAIN_LIMIT_S,
    SIZE_LIMIT,
    Env,
    parse_digits,
)
from muster._shared.guard import STOP_LIMIT_VARIABLE, parse_stop_limit_s
from muster._shared.processes import count_usable_cores
from muster.agent.cli.command_line import (
    FlagValues,
    Invocation,
    describe_seconds,
    parse_command_line,
    parse_seconds,
    read_variable,
)
from muster.agent.cli.rendezvous_flags import build_rendezvous_config, parse_hang_timeout_s
from muster.agent.config import AgentConfig, LogConfig, RendezvousConfig, Std, StdChoice
from muster.agent.errors import UsageError
from muster.agent.features import FLAG_OWNERS, load_module
from muster.agent.runtime.event_log import EVENT_LOG_HANDLERS
from muster.agent.workers.environment import build_device_env
from muster.agent.workers.spec import Program, ProgramKind

_START_METHODS = ("spawn", "fork", "forkserver")
_STARTS = ("auto", "cold", "warm")
_COLLAPSES = ("auto", "on", "off")
_NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")
_PREEMPTION_SIGNALS = ("SIGUSR1", "SIGHUP", "SIGQUIT", "SIGTERM")
"""Signals that the guard passes on. SIGINT is Ctrl-C, and SIGUSR2 prints stacks."""
DEFAULT_RESTART_BACKOFF_S = 1.0
_LEAST_COLUMNS = 40

_TERMINATION_LOG = "/dev/termination-log"
"""Where Kubernetes mounts the file for a container's termination message."""
_STD_CHOICES = {str(int(std)): std for std in (Std.NONE, Std.OUT, Std.ERR, Std.ALL)}
_ALLOWED_STD = "0 (none), 1 (stdout), 2 (stderr) or 3 (both), or by local rank, as in 0:3,1:1"


def parse_args(argv: Sequence[str], environ: Mapping[str, str]) -> AgentConfig:
    """Build the configuration from a command line and an environment.

    Args:
        argv: the words after the program's name.
        environ: the agent's environment.

    Raises:
        UsageError: one line that names the value and what is allowed.
        SystemExit: code 0, after what `--help`, `--help-all`, `--version` or `--print-completion` asks for has been
            printed.
    """
    line = parse_command_line(argv)
    if line.wants_version:
        _print_and_exit(f"muster-agent {__version__}, Python {sys.version.split()[0]}")
    if line.wants_help or line.wants_help_all or "print_completion" in line.texts:
        from muster.agent.cli import help_text

        if line.wants_help:
            _print_and_exit(help_text.format_help(help_text.choose_width()))
        if line.wants_help_all:
            _print_and_exit(help_text.format_help_all(help_text.choose_width()))
        _print_and_exit(help_text.format_completion(line.texts["print_completion"]))
    if line.script is None:
        raise UsageError("no script: give a program to run after the flags; --help shows how")
    values = FlagValues(line.texts, environ if environ.get(Env.CONTROL_FD) is None else {})
    return _build_config(values, environ, _choose_program(values, line.script, line.script_args, environ))


def _print_and_exit(text: str) -> NoReturn:
    with contextlib.suppress(OSError):  # `--help | head`
        print(text, flush=True)
    raise SystemExit(0)


def _build_config(values: FlagValues, environ: Mapping[str, str], program: Program) -> AgentConfig:
    control_fd = environ.get(Env.CONTROL_FD)
    host_name = os.uname().nodename
    shutdown_timeout_s = _choose_shutdown_timeout_s(values, environ)
    kill_limit_s = _read_kill_limit_s(environ)
    termination_log = _find_termination_log(environ)
    rendezvous = build_rendezvous_config(
        values, environ, host_name=host_name, stop_limit_s=shutdown_timeout_s + kill_limit_s
    )
    values.seconds("monitor-interval", zero=True)  # torchrun's: it is checked, and has no effect
    nproc = _choose_nproc(values, environ)
    virtual_local_rank = values.switch("virtual-local-rank")
    if virtual_local_rank:
        build_device_env(environ, nproc - 1)
    start, start_method = _choose_start(values, program)
    named = values.text("role")
    role = "default" if named is None else named
    return AgentConfig(
        program=program,
        nproc=nproc,
        rendezvous=rendezvous,
        logs=_build_log_config(values, environ, nproc=nproc),
        role=role,
        max_restarts=rendezvous.max_restarts,
        restart_backoff_s=_choose_restart_backoff_s(values),
        start=start,
        preload=values.text("preload") or "auto",
        start_method=start_method,
        kill_limit_s=kill_limit_s,
        shutdown_timeout_s=shutdown_timeout_s,
        signals_to_handle=_parse_signals(values),
        asks_at_interrupt=_asks_at_interrupt(values),
        preempt_signal=_parse_preempt_signal(values),
        drain_limit_s=_read_drain_limit_s(environ),
        features=_read_features(Invocation(values=values, environ=environ, program=program, run_id=rendezvous.run_id)),
        virtual_local_rank=virtual_local_rank,
        numa_binding=values.choice("numa-binding", _NUMA_BINDINGS),
        omp_num_threads=_choose_omp_num_threads(environ, nproc),
        hang_timeout_s=parse_hang_timeout_s(values),
        event_log_handler=_choose_event_log_handler(values),
        base_env={name: value for name, value in environ.items() if name not in Env.PRIVATE},
        agent_error_file=environ.get("TORCHELASTIC_ERROR_FILE") or None,
        node_name=environ.get(Env.NODE_NAME) or environ.get("SLURMD_NODENAME") or host_name,
        termination_log=termination_log,
        is_pod=_is_pods(termination_log, environ),
        report_columns=_choose_report_columns(environ, role, rendezvous),
        log_command=_build_log_command(environ),
        stops_together=environ.get(Env.STOPS_TOGETHER) == "1",
        sigterm_senders=_name_sigterm_senders(environ),
        slurm_job=environ.get("SLURM_JOB_ID"),
        control_fd=None if control_fd is None else int(control_fd),
        report_file=environ.get(Env.REPORT_FILE),
    )


def _read_features(texts: Invocation) -> dict[str, object]:
    """Return what the flags of features say, by the features' names; nothing of those without a flag."""
    owners = {owner for flag, owner in FLAG_OWNERS.items() if texts.values.is_on_command_line(flag)}
    return {name: load_module(name, "flags").read(texts) for name in sorted(owners)}


def _choose_program(values: FlagValues, script: str, args: tuple[str, ...], environ: Mapping[str, str]) -> Program:
    if values.switch("run-path"):
        return Program(kind=ProgramKind.RUN_PATH, target=script, args=args)
    module = values.switch("module")
    if values.switch("no-python"):
        if module:
            raise UsageError("--no-python and --module contradict each other: a module needs Python")
        return Program(kind=ProgramKind.COMMAND, target=script, args=args)
    python = environ.get("PYTHON_EXEC")
    if python and python != sys.executable:
        # Another interpreter lacks our template and start-up code, so it is a command.
        return Program(kind=ProgramKind.COMMAND, target=python, args=("-u", *(("-m",) * module), script, *args))
    return Program(kind=ProgramKind.MODULE if module else ProgramKind.SCRIPT, target=script, args=args)


def _choose_start(values: FlagValues, program: Program) -> tuple[str, str]:
    """Return (--start, --start-method). `--start fork` is torchrun's abbreviation of the latter."""
    method = values.choice("start-method", _START_METHODS) or "spawn"
    if values.text("start") in _START_METHODS:
        method, start = str(values.text("start")), "auto"
    else:
        start = values.choice("start", _STARTS) or "auto"
    if start == "warm" and program.kind is ProgramKind.COMMAND:
        raise UsageError(f"--start warm forks Python workers; {program.target!r} is another program (use --start cold)")
    return start, method


def _build_log_config(values: FlagValues, environ: Mapping[str, str], *, nproc: int) -> LogConfig:
    base_dir = values.text("log-dir") or environ.get(Env.LOG_DIR) or None
    if base_dir is not None and base_dir != os.devnull and os.path.isfile(base_dir):
        raise UsageError(f"{values.origin('log-dir')} {base_dir!r}: must be a folder or {os.devnull}, not a file")
    return LogConfig(
        base_dir=base_dir,
        links_latest=values.is_given("log-dir") and not environ.get(Env.CONTROL_FD),
        redirects=parse_std_choice(values.text("redirects") or "0", origin=values.origin("redirects")),
        tee=parse_std_choice(values.text("tee") or "0", origin=values.origin("tee")),
        local_ranks_filter=parse_ranks(
            values.text("local-ranks-filter") or "", origin=values.origin("local-ranks-filter")
        ),
        duplicate_stdout_filters=parse_texts(values.text("duplicate-stdout-filters") or ""),
        duplicate_stderr_filters=parse_texts(values.text("duplicate-stderr-filters") or ""),
        logs_specs=_choose_logs_specs(values),
        prefix_template=values.text("log-line-prefix-template")
        or environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        or None,
        shows_prefixed=_shows_prefixed(values, environ, nproc=nproc),
        marks_bars=environ.get(Env.LIVE_BARS) == "1",
        merges_lines=_merges_lines(values, nproc=nproc),
        shows_status=_shows_status(values, environ, nproc=nproc),
        # Source: https://no-color.org
        has_colour=not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb",
    )


def _shows_prefixed(values: FlagValues, environ: Mapping[str, str], *, nproc: int) -> bool:
    """See `LogConfig`. A program that draws bars itself is a notebook, where even one rank's lines have its name."""
    if environ.get(Env.CONTROL_FD) and environ.get(Env.LIVE_BARS) == "1":
        return all((values.text(name) or "0") == "0" for name in ("redirects", "tee"))
    return nproc > 1 and _is_terminal() and not any(map(values.is_given, ("redirects", "tee")))


def _merges_lines(values: FlagValues, *, nproc: int) -> bool:
    choice = values.choice("collapse-lines", _COLLAPSES) or "auto"
    return choice == "on" or (choice == "auto" and nproc >= COLLAPSED_FROM_RANKS and _is_terminal())


def _shows_status(values: FlagValues, environ: Mapping[str, str], *, nproc: int) -> bool:
    captured = any(values.text(name) == "3" for name in ("redirects", "tee"))
    is_read = captured or _shows_prefixed(values, environ, nproc=nproc)
    return is_read and _is_terminal() and environ.get("TERM", "dumb") != "dumb"


def _is_terminal() -> bool:
    """Return whether both streams of the agent go to a terminal."""
    return os.isatty(1) and os.isatty(2)


def _choose_logs_specs(values: FlagValues) -> str | None:
    name = values.text("logs-specs")
    if name is None or name == "default":
        return None
    from muster._shared.programs import find_entry_points

    known = sorted(find_entry_points("torchrun.logs_specs"))
    if name not in known:
        raise values.build_error("logs-specs", "one of " + ", ".join(dict.fromkeys(("default", *known))))
    return name


def _choose_event_log_handler(values: FlagValues) -> str:
    return values.choice("event-log-handler", EVENT_LOG_HANDLERS) or "null"


def _choose_shutdown_timeout_s(values: FlagValues, environ: Mapping[str, str]) -> float:
    flag_s = values.seconds("shutdown-timeout", zero=True)
    if flag_s is not None:
        return flag_s
    allowed, parse = describe_seconds(zero=True), partial(parse_seconds, zero=True)
    return read_variable(environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30.0, parse, allowed)


def _choose_restart_backoff_s(values: FlagValues) -> float:
    given_s = values.seconds("restart-backoff", zero=True)
    return DEFAULT_RESTART_BACKOFF_S if given_s is None else given_s


def _read_kill_limit_s(environ: Mapping[str, str]) -> float:
    limit_s = parse_stop_limit_s(environ)
    if limit_s is None:
        text = environ.get(STOP_LIMIT_VARIABLE)
        raise UsageError(f"{STOP_LIMIT_VARIABLE} {text!r}: must be a number of seconds")
    return limit_s


def _parse_signals(values: FlagValues) -> tuple[str, ...]:
    text = values.text("signals-to-handle")
    if text is None:
        return AgentConfig.signals_to_handle
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP", "SIGCHLD"):
            raise values.build_error(
                "signals-to-handle", f"names of signals that can be handled, as in SIGTERM,SIGUSR1, not {name}"
            )
    return names


def _asks_at_interrupt(values: FlagValues) -> bool:
    asks = values.choice("interrupt-action", ("stop", "ask")) == "ask"
    if asks and "SIGINT" not in _parse_signals(values):
        raise UsageError("--interrupt-action ask: --signals-to-handle must have SIGINT")
    return asks


def _parse_preempt_signal(values: FlagValues) -> str | None:
    """Parse SIGUSR1 or USR1, as Slurm writes it."""
    text = values.text("preempt-signal")
    if not text:
        return None
    name = text.strip().upper()
    name = name if name.startswith("SIG") else f"SIG{name}"
    if name not in _PREEMPTION_SIGNALS:
        raise values.build_error("preempt-signal", f"one of {', '.join(_PREEMPTION_SIGNALS)}, not {text}")
    return name


def _read_drain_limit_s(environ: Mapping[str, str]) -> float:
    allowed, parse = "a number of seconds, 0 or more", partial(parse_seconds, zero=True)
    return read_variable(environ, Env.DRAIN_LIMIT_S, DEFAULT_DRAIN_LIMIT_S, parse, allowed)


def _choose_omp_num_threads(environ: Mapping[str, str], nproc: int) -> int | None:
    """Divide the cores among several workers, so that they do not start cores x workers threads.

    Forks of the program that started the job are excluded, because its libraries have read the variable.
    """
    if "OMP_NUM_THREADS" in environ or nproc == 1 or environ.get(Env.IMAGE):
        return None
    return max(1, count_usable_cores() // nproc)


def _choose_report_columns(environ: Mapping[str, str], role: str, rendezvous: RendezvousConfig) -> int:
    """Choose the width of reports.

    TorchX puts `ROLE/NODE ` before each line, and both together fit in a terminal's 80 columns.
    """
    if not environ.get(Env.ADAPTER):
        return AgentConfig.report_columns
    return max(_LEAST_COLUMNS, min(AgentConfig.report_columns, 80 - len(f"{role}/{rendezvous.max_nodes - 1} ")))


def _name_sigterm_senders(environ: Mapping[str, str]) -> str:
    """Say what usually sends SIGTERM here. Which process has sent one is not known: Python's handlers are not told."""
    if Env.CONTROL_FD in environ:
        return "the program that has started the job"
    if Env.SIGTERM_SENDERS in environ:
        return environ[Env.SIGTERM_SENDERS]
    job_id = environ.get("SLURM_JOB_ID")
    return f"`kill`, `timeout` or {f'Slurm: see `sacct -j {job_id}`' if job_id else 'a scheduler'}"


def _build_log_command(environ: Mapping[str, str]) -> str | None:
    """Return `torchx log kubernetes://torchx/NAMESPACE:APP` if the logs are not on the user's machine."""
    adapter, app_id = environ.get(Env.ADAPTER), environ.get(Env.APP_ID)
    if not (adapter and app_id) or Env.LOGS_HERE in environ:
        return None
    return f"torchx log {environ.get('TORCHX_JOB_ID') or f'{adapter}://torchx/{app_id}'}"


def _choose_nproc(values: FlagValues, environ: Mapping[str, str]) -> int:
    text = values.text("nproc-per-node")
    if text is None:
        return 1
    if number := parse_digits(text, SIZE_LIMIT):
        return number
    from muster.agent.placement.device_count import count_workers

    python = environ.get("PYTHON_EXEC") or sys.executable
    return count_workers(text, origin=values.origin("nproc-per-node"), env=environ, python=python)


def _is_pods(termination_log: str | None, environ: Mapping[str, str]) -> bool:
    """Return whether it is that of a pod. Adapters that have files of their own for the report name them otherwise."""
    if termination_log is None:
        return False
    return Env.ADAPTER not in environ or os.path.basename(termination_log) == os.path.basename(_TERMINATION_LOG)


def _find_termination_log(environ: Mapping[str, str]) -> str | None:
    is_default = Env.ADAPTER not in environ and os.path.exists(_TERMINATION_LOG)
    return environ.get(Env.TERMINATION_LOG, _TERMINATION_LOG if is_default else "") or None


# -- the streams' own grammar ------------------------------------------------------------------------------------------


def parse_std_choice(text: str, *, origin: str) -> StdChoice:
    """Parse `3` for all ranks, or `0:3,12:1` for some and none for the others.

    A rank may have any number, unlike torchrun's one digit.

    Args:
        text: the flag's value.
        origin: `--tee` or `PET_TEE`, for the error.

    Raises:
        UsageError: anything else.
    """
    if text in _STD_CHOICES:
        return StdChoice(default=_STD_CHOICES[text])
    by_rank: dict[int, Std] = {}
    for pair in text.split(","):
        rank, colon, choice = pair.partition(":")
        number = parse_digits(rank, SIZE_LIMIT)
        if not colon or number is None or choice not in _STD_CHOICES:
            raise UsageError(f"{origin} {text!r}: must be {_ALLOWED_STD}")
        by_rank[number] = _STD_CHOICES[choice]
    return StdChoice(by_rank=by_rank)


def parse_ranks(text: str, *, origin: str) -> frozenset[int] | None:
    """Parse `0,2` as a set of local ranks; None, which is all of them, for an empty text.

    Raises:
        UsageError: anything else.
    """
    if not text:
        return None
    ranks = [parse_digits(word, SIZE_LIMIT) for word in text.split(",")]
    if None in ranks:
        raise UsageError(f"{origin} {text!r}: must be local ranks separated by commas, as in 0,2")
    return frozenset(rank for rank in ranks if rank is not None)


def parse_texts(text: str) -> tuple[str, ...]:
    """Split texts at commas; `,,` is a comma within a text. An empty text gives no texts."""
    if not text:
        return ()
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(","))
