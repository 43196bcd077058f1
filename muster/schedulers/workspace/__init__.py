"""The user's folder, the workspace, which travels with a job.

`packing` decides what travels and packs it, `ignore_rules` are those of `.torchxignore`. Adapters import `packing`.
"""
