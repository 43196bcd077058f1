"""The options of `-cfg` for local_cwd and detached."""

from collections.abc import Mapping
from dataclasses import dataclass

from muster.schedulers.runner.option_records import DETACH, ENV, GRACE_S, option


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """The caller's options, checked."""

    log_dir: str | None = option(str, "folder for logs and state (default: ~/.local/state/muster)")
    prepend_cwd: bool = option(bool, "put the current folder first in PATH instead of last", default=False)
    auto_set_cuda_visible_devices: bool | None = option(
        bool,
        "true: every replica gets the GPUs that it requests, and too few GPUs are an error; false: every replica "
        "sees all; default: if the app has several nodes on this machine, they divide the GPUs",
    )
    env: Mapping[str, str] = ENV.as_field()
    detach: bool = DETACH.as_field()
    grace_s: float | None = GRACE_S.as_field()
