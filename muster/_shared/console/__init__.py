"""What a person sees of a running job on a terminal: the agent's own, or that of `torchx run` and `muster run`.

`alike_lines` prints once what several ranks say alike. It works on the `units` into which their output is cut.
`progress_bars` draws the live rows at the bottom. `summary` words the last of them, and what is said in the end. All
of it is pure: it knows no terminal.

What writes to the terminal is not here but in `agent.logs` and `schedulers.runner.job_console`.
"""
