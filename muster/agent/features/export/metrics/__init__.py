"""What monitoring reads of a running agent: numbers named as in Prometheus and OpenTelemetry, and a port for them.

`families` lists the metrics, and builds them from what is known of the job and of this node. Some are what torch's
agent publishes. `source` keeps what they are built from: the last look of `telemetry.plane`, and counts of the agent's
records. `endpoint` writes them as Prometheus' text and as OpenMetrics, and serves that over HTTP, in its own thread.
`traces` sends the same metrics to a collector.
"""
