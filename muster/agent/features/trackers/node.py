"""The part: names a job's one run to trackers, the same after every restart.

The `init` of Weights & Biases, Comet and MLflow reads from variables which run it continues. The variables are set only
for global rank 0, and not for a tracker of which the user has set a variable. If one script began several runs in one
attempt, they would become one run. So all of this is optional.

MLflow's server gives a run its id, which cannot be known before. There each attempt's run gets tags with the ids, by
which the script finds the run to continue.

Source: wandb 0.31 (sdk/wandb_settings.py, `validate_run_id`), comet_ml 3.58 (`is_valid_experiment_key`), mlflow 3.17
(tracking/context/system_environment_context.py).
"""

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from muster.agent.node.round_parts import PartContext, RoundPart

if TYPE_CHECKING:
    from muster.agent.round import Round

_WANDB: Final = ("WANDB_RUN_ID", "WANDB_RESUME")
_COMET: Final = ("COMET_EXPERIMENT_KEY", "COMET_START_MODE")
_MLFLOW: Final = ("MLFLOW_RUN_ID", "MLFLOW_RUN_CONTEXT")
_RESERVED: Final = frozenset(":;,#?/'\\ \t\n")
_WANDB_CHARS: Final = 128


def build_tracker_env(run_id: str, attempt: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that let trackers continue one run; `env` is the worker's, with the user's variables."""
    tags = {"muster.job_id": run_id, "muster.attempt_id": f"{run_id}-{attempt}"}
    trackers = (
        (_WANDB, {"WANDB_RUN_ID": _name_wandb_run(run_id), "WANDB_RESUME": "allow"}),
        (_COMET, {"COMET_EXPERIMENT_KEY": _hash(run_id)}),
        (_MLFLOW, {"MLFLOW_RUN_CONTEXT": json.dumps(tags)}),
    )
    return {
        name: value
        for own, values in trackers
        if not any(name in env for name in own)
        for name, value in values.items()
    }


def _name_wandb_run(run_id: str) -> str:
    is_allowed = len(run_id) <= _WANDB_CHARS and not _RESERVED & set(run_id)
    return run_id if is_allowed else _hash(run_id)


def _hash(text: str) -> str:
    """Return 32 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class TrackersPart(RoundPart):
    """Needs nothing but the job's id."""

    def __init__(self, context: PartContext) -> None:
        self._config = context.config

    def build_env(self, formed: "Round", local_rank: int) -> Mapping[str, str]:
        """See `RoundPart`."""
        if formed.rank_offset + local_rank:
            return {}
        return build_tracker_env(self._config.rendezvous.run_id, formed.attempt, self._config.base_env)


def create_part(context: PartContext) -> TrackersPart:
    """Create the part of one agent."""
    return TrackersPart(context)
