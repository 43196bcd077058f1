"""Why a worker or the job failed.

`failures` gathers what one dead worker left behind and `oom` what the kernel says about memory, `stacks` takes Python
stacks of live workers, `hang` notices that no worker shows signs of life. `root_cause` orders failures and chooses the
root cause. `report` is the result as data, `report_text` puts it into words, `report_files` into files.

Not here: what follows from a failure (`node.decisions`, `rendezvous.consensus.failures`), and where the report goes
(`node.outcome`). What only a failure, a hang or a command needs is imported then.
"""
