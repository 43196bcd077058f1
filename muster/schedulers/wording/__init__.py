"""Why apps are in their states, as data; and the only place that makes sentences of it.

Adapters return a state and reasons: codes of one closed enum with their facts, never a sentence. What another program
says itself, such as Slurm's reason or the message of a Kubernetes event, is a fact and is quoted. Nothing decides by
reading a sentence of ours.

`facts` has what is known of an app. `reasons` has the codes, each with the template of its words, the record of a
reason, and what tells one wait from another. It needs the standard library only: supervisors and nodes record reasons.
It also has what agents say of a job. `words` fills a template with the facts of a reason, and has Slurm's own names in
plain words. `job_line` has the one line of a job, and its values for programs. `replica_lines` has what `torchx status`
shows of a replica that has failed or was cancelled.
"""
