"""Reports progress to a TrainJob of Kubeflow that contains the agent. `sink` is all of it."""
