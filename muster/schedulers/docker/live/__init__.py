"""An app on the engine, from its creation to its removal.

`preflight` checks images, `creation` makes network, volumes and containers, `payload` is what is copied into them,
`reservations` keeps apps from sharing GPUs and ports. `exit_evidence` and `exit_reason` say why a container ended,
`logs` follows output, `unregistered` finds apps that only the engine knows.
"""
