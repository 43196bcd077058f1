"""Connects an agent to its outside observers: a port with metrics, and a collector of OpenTelemetry."""

import os
from collections.abc import Callable, Mapping

from muster import __version__
from muster._shared.contract import DEFAULT_RUN_ID, Env, OtelEnv, show_controls
from muster._shared.records import replace
from muster.agent.config import AgentConfig
from muster.agent.features.export.exporter import Exporter, Settings, read_settings
from muster.agent.features.export.source import MetricsSource
from muster.agent.features.export.spans import SpanMaker
from muster.agent.features.sink import SinkContext
from muster.agent.runtime.event_log import EventLog
from muster.agent.runtime.loop import Loop
from muster.agent.workers.run_names import TraceParent, derive_span_id, derive_trace_id, parse_trace_parent


def connect(context: SinkContext) -> AgentConfig:
    """Serve metrics, and export spans and metrics, as far as the configuration and the variables request it.

    Returns:
        The configuration, with the job's span if there are traces.
    """
    config, environ, loop, event_log = context.config, context.environ, context.loop, context.event_log
    print_line = context.logs.print_line
    settings = _read_settings(environ, print_line)
    parent = parse_trace_parent(environ.get(OtelEnv.TRACE_PARENT, ""))
    job = _name_job(config, parent)
    if "traces" in settings.addresses:  # workers' spans need an exported parent
        config = replace(config, trace_parent=job.format())
    rendezvous = config.rendezvous
    source = MetricsSource(rendezvous.run_id, config.role, config.max_restarts, config.trace_parent)
    event_log.add_sink(source)
    event_log.on_look = source.look
    address = config.features.get("export")
    if address is not None:
        _serve(address, source, loop, event_log, print_line)
    if settings.addresses:
        is_elastic = rendezvous.min_nodes < rendezvous.max_nodes
        maker = SpanMaker(parent, job, rendezvous.run_id, rendezvous.node_index, is_elastic=is_elastic)
        event_log.add_sink(
            _build_exporter(
                config, environ, loop, settings, source, maker if job.is_sampled else None, job.trace_id, print_line
            )
        )
    return config


def _read_settings(environ: Mapping[str, str], print_line: Callable[[str], None]) -> Settings:
    if not any(environ.get(name) for name in OtelEnv.ENDPOINTS):
        return Settings()
    settings = read_settings(environ)
    for problem in settings.problems:
        print_line(show_controls(problem))
    return settings


def _name_job(config: AgentConfig, parent: TraceParent | None) -> TraceParent:
    """Return the span of the job, the same on all nodes. For a job without its own id, each agent has a trace."""
    run_id = config.rendezvous.run_id
    name = run_id if run_id != DEFAULT_RUN_ID else f"{run_id} {os.urandom(16).hex()}"
    trace_id = derive_trace_id(name) if parent is None else parent.trace_id
    flags = "01" if parent is None else parent.flags
    return TraceParent(trace_id=trace_id, span_id=derive_span_id(trace_id, f"job {run_id}", 0), flags=flags)


def _serve(
    address: tuple[str, int],
    source: MetricsSource,
    loop: Loop,
    event_log: EventLog,
    print_line: Callable[[str], None],
) -> None:
    from muster.agent.features.export.endpoint import MetricsEndpoint

    try:
        endpoint = MetricsEndpoint(address, source, loop)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        host, port = address
        print_line(f"--metrics-port: cannot listen at {host} port {port}: {reason}; the job runs without metrics")
        return
    event_log.node_facts["metrics"] = endpoint.address
    event_log.add_sink(endpoint)


def _build_exporter(
    config: AgentConfig,
    environ: Mapping[str, str],
    loop: Loop,
    settings: Settings,
    source: MetricsSource,
    maker: SpanMaker | None,
    trace_id: str,
    print_line: Callable[[str], None],
) -> Exporter:
    run_id = config.rendezvous.run_id
    resource = {
        "service.name": config.role or "muster",
        "service.version": __version__,
        "service.instance.id": f"{run_id}/{config.node_name}",
        "host.name": config.node_name,
        "cicd.pipeline.name": config.role,
        "cicd.pipeline.run.id": run_id,
        **({"muster.adapter": environ[Env.ADAPTER]} if environ.get(Env.ADAPTER) else {}),
        **settings.resource,
    }
    return Exporter(
        settings,
        source,
        maker,
        trace_id=trace_id,
        resource=resource,
        on_loop=loop.call_from_thread,
        print_line=print_line,
    )
