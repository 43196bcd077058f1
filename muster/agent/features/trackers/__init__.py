"""`--tracker-run`: a job is one run in Weights & Biases, Comet and MLflow, also after a restart.

`flags` has the flag, and `node` is the part, which sets the trackers' variables of global rank 0.
"""
