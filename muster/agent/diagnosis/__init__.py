"""Why a worker or the job failed.

`failures` builds the report of one failed worker. `classes` finds the class of its cause, and `kernel_log` what the
kernel says of devices and memory. `tracebacks` reads what Python wrote of an exception. `stacks` collects the Python
stacks of live workers. `hangs` asks the feature that finds the ranks that block the others
(`rendezvous.consensus.failures` decides whether the job hangs). `root_cause` orders failures and names the root cause
for all readers. The result is a `_shared.reports.Report`, which `report_text` formats for people and `report_files`
writes to files.

Not here: what follows from a failure (`node.worker_decisions`, `rendezvous.consensus.failures`), and where the report
goes (`node.outcome`). Modules that only a failure, a hang or a command needs are imported then.

From outside, import any module.
"""
