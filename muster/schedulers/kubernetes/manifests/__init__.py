"""The documents of a submission. Pure, offline, deterministic.

Start reading at `request.build_request`. `inputs` checks an app and derives what the flavours need; `job`, `jobset`
and `volcano` are the flavours; `pod` builds the container with its environment (rank 0's address too), `volumes`,
`pod_group` and `patch` are further parts. `bundles` carries the agent and the workspace, `app_annotation` encodes
the AppDef, `dry_run` prints all documents.
"""
