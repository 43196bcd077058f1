"""Scheduler adapters: how an AppDef becomes running replicas on this machine, a Docker engine or Kubernetes.

Imports nothing: supervisor processes load single modules of this package and must start fast.
"""
