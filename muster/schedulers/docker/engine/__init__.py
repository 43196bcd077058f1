"""The adapter's interface to the Docker engine. `sdk` is the only module that imports Docker's SDK.

`client` has one method per request. `errors` holds the errors, and `container_state` the state of a container. `probe`
runs a command in a temporary container. `outside_stops` detects that a person stops containers or restarts them, and
that the engine is about to stop. `inside_stream` is the connection to a command in a container.
"""
