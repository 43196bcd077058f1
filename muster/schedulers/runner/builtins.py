"""Registers TorchX's own schedulers again, except those that ours replace: on 0.7 any plug-in hides all of them.

Each is imported when first used. A missing client library, or a scheduler that this TorchX does not have, raises
ModuleNotFoundError: `torchx runopts` prints that as a line and goes on with the next scheduler. (0.7's `ray` without
ray raises NameError, which ends `torchx runopts` with a traceback.)
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any


def _create(module: str, session_name: str, **kwargs: Any) -> Any:
    try:
        factory: Callable[..., Any] = importlib.import_module(f"torchx.schedulers.{module}").create_scheduler
    except ModuleNotFoundError:
        raise
    except (ImportError, NameError, AttributeError) as error:
        raise ModuleNotFoundError(f"torchx.schedulers.{module} cannot be used here: {error}") from error
    return factory(session_name, **kwargs)


create_slurm = partial(_create, "slurm_scheduler")

# 0.7 only:
create_kubernetes_mcad = partial(_create, "kubernetes_mcad_scheduler")
create_aws_batch = partial(_create, "aws_batch_scheduler")
create_aws_sagemaker = partial(_create, "aws_sagemaker_scheduler")
create_gcp_batch = partial(_create, "gcp_batch_scheduler")
create_ray = partial(_create, "ray_scheduler")
create_lsf = partial(_create, "lsf_scheduler")
