"""On a held node, templates are forks of one process that imports before there is a program: `original`.

What it imports is in `preload`.

From outside, import `original`: `template` does, in that process.
"""
