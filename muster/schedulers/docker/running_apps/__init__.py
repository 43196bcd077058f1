"""An app on the engine, from its creation to its removal.

`image_check` looks into images. `creation` creates network, volumes and containers, and `payload` holds what is copied
into them. `reservations` keeps apps from sharing GPUs or ports. `exit_evidence` explains why a container ended.
`restarts` reads restarts in place, a hang and the last checkpoint, and `logs` follows output. `submissions` marks apps
that are being submitted, and `orphaned_apps` finds apps that only the engine knows. It also finds what has no app
any more. `agent_requests` asks the agent in a container.
"""
