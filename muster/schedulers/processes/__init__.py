"""Replicas that are processes of this machine, or programs here that stand for something elsewhere (`ssh`, `srun`).

`driver` starts and ends them for a supervisor. `link_driver` starts what stands for a
node elsewhere, see `node_program.link`. `capture` writes their output, and `file_logs` reads it. `agent_files` reads
what their agents report. local_cwd consists of these. Adapters of other packages get them from
`muster.schedulers.adapter`.

This module imports nothing: supervisor processes load single modules of this package and must start fast.
"""
