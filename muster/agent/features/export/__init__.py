"""Metrics and traces for outside observers: a port for Prometheus, and a collector of OpenTelemetry.

    flags     the flag of the port
    sink      connects what is wanted
    families  the metrics, built from what is known of the job and of this node; some are what torch's agent publishes
    source    what they are built from: the last look of `telemetry.plane`, and counts of the agent's records
    endpoint  writes them as Prometheus' text and as OpenMetrics, and serves that over HTTP, in its own thread
    spans     makes spans of the agent's records: of each attempt, recovery, drain and hang when it ends, and of the job
    encoding  writes spans and metrics as OTLP's JSON
    exporter  reads OpenTelemetry's own variables, and sends both, in its own thread with a bounded buffer

Metrics are named as in Prometheus and OpenTelemetry. No SDK is needed, because the agent has no dependencies.
"""
