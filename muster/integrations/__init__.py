"""Callbacks for trainers of other packages: a script imports the one of its trainer. They travel with the job.

    huggingface   for `Trainer` of transformers
    lightning     for Lightning's `Trainer`

From outside, import one of these modules. Each imports its trainer's package and, of muster, `worker` and `snapshots`.
"""
