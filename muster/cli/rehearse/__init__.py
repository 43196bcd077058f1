"""`muster rehearse`: runs the user's own job on this machine, undisturbed first, then once for each fault.

`command` has the whole course. `plan` chooses what is tried and when, `trial` does one run: it submits the job to
local_cwd in a folder of its own, `watch` follows its processes and steps, `saves` sees checkpoints being written.
`outcome` judges a run from what its agents have recorded, `advice` says what to change; `table` and `page` write it.
`live` causes faults in a job that runs (--app). `world` has the network and the disk of a run, `journal` what a fault
has to undo, on disk. The package `faults` is the library of faults.

From outside, import `command`; and for tests any module of `faults`, `journal` and `world`.
"""
