"""The options of `-cfg` for held and local_held: those of local_cwd, and which hold."""

from dataclasses import dataclass

from muster.schedulers.local.options import LocalOptions
from muster.schedulers.runner.option_records import option


@dataclass(frozen=True, kw_only=True)
class HeldOptions(LocalOptions):
    """The caller's options, checked."""

    app: str | None = option(str, "the hold, as `muster hold` prints it (default: the only one there is)")
    wait: bool = option(
        bool, "wait until the hold's run has ended; false: refuse the job while the hold has a run", default=False
    )
