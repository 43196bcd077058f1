"""Lends the terminal to one worker's debugger at a time. The worker's side is `muster._shared.debugger`.

`node` is the part, which serves a round once a worker has asked for the terminal.
"""
