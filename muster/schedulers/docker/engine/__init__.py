"""The adapter's interface to the Docker engine. `sdk` is the only module that imports Docker's SDK.

`client` has one method per request, `errors` holds the errors, `container_state` the state of a container, `probe` runs
a command in a temporary container, `shutdown` detects that the engine is about to stop.
"""
