"""What monitoring reads of a running agent: numbers as Prometheus and OpenTelemetry name them, and a port for them.

`families` says which metrics there are, and builds them from what is known of the job and of this node; `elastic_names`
has what torch's agent publishes. `source` keeps what they are built of: the last look of `telemetry.plane`, and counts
of the agent's records. `exposition` writes them as Prometheus' text and as OpenMetrics, `endpoint` serves that over
HTTP, in a thread of its own. `telemetry.traces` sends the same metrics to a collector.

Loaded with `--metrics-port` or a collector of OpenTelemetry only.

From outside, import `source`, `endpoint` and `families`.
"""
