"""One thing that muster sees of a machine, with a verdict."""

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

_CREDENTIALS: Final = re.compile(r"//[^/@\s]*@")
_QUERY: Final = re.compile(r"(//[^\s?]+)\?[^\s)'\"]*")
"""The query of an address. A token may be in it."""


class Verdict(Enum):
    """What it means for jobs on this machine."""

    OK = "ok"
    ABSENT = "absent"
    """It is not here, and only some jobs need it."""
    WARNING = "warning"
    ERROR = "error"
    """No job that needs it can run."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One line for people. `facts` are for a bug report, and hold no secret."""

    name: str
    verdict: Verdict
    text: str
    advice: str = ""
    """The next step."""
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return JSON types."""
        return {**vars(self), "verdict": self.verdict.value}


def hide_credentials(text: str) -> str:
    """Remove user, password and query from addresses."""
    return _QUERY.sub(r"\1", _CREDENTIALS.sub("//", text))
