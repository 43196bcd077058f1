"""`muster rehearse`: runs the user's own job on this machine, undisturbed first, then once for each fault.

`command` has the whole course. `plan` chooses what is tried and when, and `trial` does one run: it submits the job to
local_cwd in a folder of its own. `watch` follows the job's processes and steps, and `saves` sees checkpoints being
written. `outcome` judges a run from what its agents have recorded. `table` and `page` write the result, and what to
change. `live` causes faults in a job that runs (--app). `world` has the network and the disk of a run, and `journal`
keeps on disk what has to be undone. `faults` is the library of faults.

From outside, import `command`. Tests may also import `faults`, `journal` and `world`.
"""
