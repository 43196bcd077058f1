"""The user's folder, the workspace, which travels with a job.

`packing` decides what travels and packs it. `ignore_rules` has the rules of `.torchxignore`. Adapters import `packing`.
"""
