"""`muster doctor`: what muster sees of this machine, each with a verdict and the next step, for people and bug reports.

`command` prints it. `machine` looks at the machine itself, by the same table of checks as `--preflight`. `services`
looks at what jobs can be submitted to: a Docker engine, a cluster, Slurm. Both return observations.

What nodes compare is not here: that takes a job.
"""
