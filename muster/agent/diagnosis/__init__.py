"""Why a worker or the job failed.

`failures` gathers what one dead worker left behind and `oom` the kernel's word on memory, `stacks` takes Python stacks
of live workers, `hang` notices that no worker shows signs of life. `root_cause` orders failures and chooses the root
cause. `report` is the result as data, `report_text` and `report_files` put it in words and files, `outcome` publishes
it when the job ends.

Not here: what follows from a failure (`node.decisions`, `rendezvous.consensus.failures`). What only a failure, a hang
or a command needs is imported then.
"""
