"""Metrics and traces for outside observers: a port for Prometheus, and a collector of OpenTelemetry.

`flags` has the flag of the port. `sink` connects what is wanted. `metrics` has the metrics and their port, and `traces`
sends spans and metrics.
"""
