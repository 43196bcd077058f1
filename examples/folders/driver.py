"""Starts replicas for the supervisor, each in its own folder with a copy of the workspace."""

import os

from muster.schedulers.adapter import BundleError, Launch, ProcessDriver, ReplicaId, StartError, copy_workspace


class FolderDriver(ProcessDriver):
    """Runs in the supervisor's process: it loads neither TorchX nor anything heavy."""

    def build_launch(self, replica: ReplicaId, start_number: int) -> Launch:
        """Prepare the folder at the first start. A replica that starts again finds what it has written."""
        launch = super().build_launch(replica, start_number)
        try:
            if not os.path.exists(launch.cwd):
                os.makedirs(launch.cwd)
                workspace = self.spec.details["workspaces"].get(replica.role)
                if workspace is not None:
                    copy_workspace(workspace, launch.cwd)
        except (OSError, BundleError) as error:
            raise StartError(f"{launch.cwd}: {error}") from error
        return launch
