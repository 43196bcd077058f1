"""An app on the engine, from its creation to its removal.

`image_check` looks into images by temporary containers. `creation` creates network, volumes and containers, and keeps
what is copied into them. `reservations` keeps apps from sharing GPUs or ports. `exit_evidence` explains why a container
ended, and reads restarts in place, a hang and the last checkpoint. `logs` follows output. `orphaned_apps` marks apps
that are being submitted, and finds apps that only the engine knows, and what has no app any more.
"""
