"""The options of `-cfg` for `slurm`. The options of TorchX's adapter, of both lines, have its names and meaning."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from muster.schedulers.errors import OptionError
from muster.schedulers.runner.option_records import (
    ENV,
    GRACE_S,
    build_choice_parser,
    build_pattern_parser,
    option,
    parse_count,
    parse_words,
)

CONTINUES: Final = ("requeue", "expedite", "follow-up", "no")
GPUS: Final = ("gres", "tres", "none")

_SIGNAL: Final = re.compile(r"USR1@[0-9]+")
_TIME: Final = re.compile(r"[0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_OURS: Final = ("nodes", "ntasks", "ntasks-per-node", "no-kill", "kill-on-bad-exit", "job-name", "output", "export")
"""Options of Slurm's that the adapter sets itself."""
_OF_IMAGES: Final = ("container-image", "container-mounts")
"""Options of Slurm's for which the adapter has its own: what runs in an image is started in another way."""


def _parse_line(name: str, value: Any) -> tuple[str, ...]:
    """Split a text into words as a shell does."""
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        raise OptionError(f"{name}={value!r}: {error}", name) from error


def _parse_extra(name: str, value: Any) -> tuple[str, ...]:
    """Parse long options of a command of Slurm's: `--licenses=a --exclude=n7`."""
    words = _parse_line(name, value)
    for word in words:
        flag = word.removeprefix("--").partition("=")[0]
        if not word.startswith("--") or not flag:
            raise OptionError(f"{name}: {word!r} must be a long option, such as --licenses=NAME", name)
        if flag == "array":
            raise OptionError(f"{name}: {word!r}: one app is one job; submit an app for each task of an array", name)
        if flag in _OF_IMAGES:
            raise OptionError(f"{name}: {word!r}: use {word[2:].replace('-', '_', 1)}", name)
        if flag in _OURS:
            raise OptionError(f"{name}: {word!r}: the adapter sets --{flag} itself", name)
    return words


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """The caller's options, checked."""

    partition: str | None = option(str, "partition of the job")
    time: str | None = option(
        str,
        "time limit: MINUTES, HOURS:MINUTES:SECONDS, DAYS-HOURS, ...",
        parse=build_pattern_parser(_TIME, "minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS, such as 4:00:00 for 4 hours"),
    )
    account: str | None = option(str, "account of the job")
    qos: str | None = option(str, "quality of service")
    comment: str | None = option(str, "comment of the job")
    constraint: str | None = option(str, "features that the nodes must have")
    reservation: str | None = option(str, "reservation from which the nodes are taken")
    mail_user: str | None = option(str, "who gets mail", name="mail-user")
    mail_type: str | None = option(str, "events that send mail", name="mail-type")
    job_dir: str | None = option(
        str,
        "folder for the job's code, logs and state, which must not exist yet; with it the workspace is copied there. "
        "Default: a folder in ~/.local/state/muster, and the job runs in the current folder",
    )
    workspace_type: str = option(
        str,
        "how the workspace reaches the nodes; dir: it is copied to job_dir (docker: only TorchX's own adapter, "
        "slurm_torchx, has this)",
        default="dir",
        parse=build_choice_parser("dir", "docker"),
    )
    image_repo: str | None = option(str, "only for workspace_type=docker")
    quiet: bool = option(bool, "do not report which files of the workspace are left out", default=False)
    exclusive: bool = option(bool, "give the job whole nodes", default=False)
    segment: int | None = option(
        int, "number of nodes of a segment (an NVLink domain) that Slurm allocates together", parse=parse_count
    )
    spares: int = option(int, "number of spare nodes, which replace lost ones", default=0, parse=parse_count)
    gpus: str = option(
        str,
        "how to request GPUs: gres (--gres=gpu:N), tres (--gpus-per-node=N) or none (the partition gives them)",
        default="gres",
        parse=build_choice_parser(*GPUS),
    )
    gpu_type: str | None = option(str, "type of GPU, as the cluster names it: a100")
    continues: str = option(
        str,
        "how the job goes on after a preemption, and after its time limit if a checkpoint was saved: requeue, expedite "
        "(requeue=expedite, Slurm 25.11), follow-up (another job by dependency) or no",
        default="requeue",
        parse=build_choice_parser(*CONTINUES),
    )
    signal: str | None = option(
        str,
        "SIGNAL@SECONDS, e.g. USR1@120: Slurm sends the signal this many seconds before it ends the job, and the job "
        "stops as for a preemption. By default no signal is needed",
        parse=build_pattern_parser(
            _SIGNAL, "of the form USR1@SECONDS: every process of the job gets it, and any other signal would end them"
        ),
    )
    shared: bool = option(
        bool,
        "whether the nodes see the app's folder; false: what they need travels in the script and by sbcast",
        default=True,
    )
    node_dir: str = option(str, "with shared=false: a folder that every node has for itself", default="/tmp")  # noqa: S108
    python: str | None = option(
        str,
        "Python 3.10 or newer on the nodes; default: that of the current environment, and python3 in an image",
    )
    modules: tuple[str, ...] = option(
        list[str], "modules to load before the job, NAME;NAME", parse=parse_words, absent=()
    )
    prolog: str | None = option(str, "a line of shell that the script runs before the job")
    container_image: str | None = option(str, "image that pyxis runs the job in (srun --container-image)")
    container_mounts: str | None = option(
        str, "mounts for container_image (srun --container-mounts), besides the app's folder and the current one"
    )
    prefix: tuple[str, ...] = option(
        str,
        "words to put before the command of every replica: apptainer exec --nv image.sif",
        parse=_parse_line,
        absent=(),
    )
    sbatch: tuple[str, ...] = option(
        str, "more options of sbatch: --licenses=a --exclude=n7", parse=_parse_extra, absent=()
    )
    srun: tuple[str, ...] = option(str, "more options of srun", parse=_parse_extra, absent=())
    env: Mapping[str, str] = ENV.as_field()
    grace_s: float | None = GRACE_S.as_field()
