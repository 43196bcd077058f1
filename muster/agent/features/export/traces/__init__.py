"""Sends what happens to a job to a collector of OpenTelemetry, as spans, and its metrics.

`settings` reads OpenTelemetry's own variables. `spans` makes spans of the agent's records: of each attempt, recovery,
drain and hang when it ends, and of the job. `encoding` writes both signals as OTLP's JSON. `exporter` sends them, in
its own thread with a bounded buffer. No SDK of OpenTelemetry is needed, because the agent has no dependencies.
"""
