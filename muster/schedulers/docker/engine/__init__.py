"""The adapter's interface to the Docker engine. `sdk` is the only module that imports Docker's SDK.

`client` has one method per request, and `build_layers` reads the output of a build. `errors` holds the errors, and
`container_state` the state of a container. `probe` runs a command in a temporary container. `shutdown` detects that the
engine is about to stop, and `outside_stops` that a person stops containers or restarts them. `inside_stream` is the
connection to a command in a container.
"""
