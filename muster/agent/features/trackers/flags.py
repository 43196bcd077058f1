"""The flag."""

from typing import Final

from muster._shared.contract import DEFAULT_RUN_ID
from muster.agent.cli.command_line import Invocation
from muster.agent.cli.flag_table import Flag
from muster.agent.errors import UsageError

FLAGS: Final = (
    Flag(
        name="tracker-run",
        ours=True,
        has_variable=False,
        text="All attempts are one run in Weights & Biases and Comet, and have the job's id as tag in MLflow. "
        "Global rank 0 gets WANDB_RUN_ID and WANDB_RESUME, COMET_EXPERIMENT_KEY and "
        "MLFLOW_RUN_CONTEXT, unless the tracker's variables are set. If a script begins several runs, they "
        "become one. With more than one agent it needs --rdzv-id.",
    ),
)


def read(invocation: Invocation) -> bool:
    """Return whether the flag is on."""
    is_on = invocation.values.switch("tracker-run")
    if is_on and invocation.run_id == DEFAULT_RUN_ID:
        raise UsageError("--tracker-run needs a job with an id of its own: give --rdzv-id ID")
    return is_on
