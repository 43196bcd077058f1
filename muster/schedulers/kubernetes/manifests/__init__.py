"""The documents of a submission. Pure, offline, deterministic.

`request.build_request` is the way in. `inputs` is what the flavours need to know of an app, worked out once; `job`,
`jobset` and `volcano` are the flavours, `pod`, `volumes`, `pod_group` and `patch` their parts. `bundles` packs the
agent and the workspace, `app_annotation` keeps the AppDef, `dry_run` prints it all.
"""
