"""The documents of a submission. Pure, offline, deterministic.

Start reading at `request.build_request`. `inputs` checks an app and derives what the flavours need. `jobs` has
the flavours and gangs, and `pod` builds the container with its environment (rank 0's address too) and volumes.
`features` is a further part. `bundles` carries the agent, the workspace and the AppDef. `request` prints all documents,
too.

A JobSet does what one Job for each role cannot: the cluster stops the other roles when one has failed. It restarts all
of them (`RetryPolicy.APPLICATION` of a role without our agent), deletes all at once after `ttl_s`, and Kueue admits all
or none.
"""
