"""Registers again TorchX's own schedulers that ours do not replace: on 0.7 any plug-in hides all of them.

Each is imported when first used. A missing client library, or a scheduler that this TorchX does not have, raises
ModuleNotFoundError: `torchx runopts` prints that as a line and goes on with the next scheduler. (0.7's `ray` without
ray raises NameError, which ends `torchx runopts` with a traceback.)
"""

import importlib
from collections.abc import Callable
from typing import Any


def _load(module: str) -> Callable[..., Any]:
    try:
        factory: Callable[..., Any] = importlib.import_module(f"torchx.schedulers.{module}").create_scheduler
    except ModuleNotFoundError:
        raise
    except (ImportError, NameError, AttributeError) as error:
        raise ModuleNotFoundError(f"torchx.schedulers.{module} cannot be used here: {error}") from error
    return factory


def create_slurm(session_name: str, **kwargs: Any) -> Any:
    """Both lines."""
    return _load("slurm_scheduler")(session_name, **kwargs)


def create_kubernetes_mcad(session_name: str, **kwargs: Any) -> Any:
    """0.7 only."""
    return _load("kubernetes_mcad_scheduler")(session_name, **kwargs)


def create_aws_batch(session_name: str, **kwargs: Any) -> Any:
    """0.7 only."""
    return _load("aws_batch_scheduler")(session_name, **kwargs)


def create_aws_sagemaker(session_name: str, **kwargs: Any) -> Any:
    """0.7 only."""
    return _load("aws_sagemaker_scheduler")(session_name, **kwargs)


def create_gcp_batch(session_name: str, **kwargs: Any) -> Any:
    """0.7 only."""
    return _load("gcp_batch_scheduler")(session_name, **kwargs)


def create_ray(session_name: str, **kwargs: Any) -> Any:
    """0.7 only."""
    return _load("ray_scheduler")(session_name, **kwargs)


def create_lsf(session_name: str, **kwargs: Any) -> Any:
    """0.7 only."""
    return _load("lsf_scheduler")(session_name, **kwargs)
