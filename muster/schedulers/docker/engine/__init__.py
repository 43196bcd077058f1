"""The Docker engine as the adapter sees it. `sdk` is the only module that imports Docker's SDK.

`client` has one method per thing that is asked, `errors` what can go wrong, `container_state` what the engine says of a
container, `probe` runs a command in a throw-away container, `shutdown` notices that the engine is about to stop.
"""
