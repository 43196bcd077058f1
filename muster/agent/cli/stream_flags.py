"""Parses `--redirects`, `--tee` and the filters."""

from muster.agent.config import Std, StdChoice
from muster.agent.errors import UsageError

_WORDS = {str(int(std)): std for std in (Std.NONE, Std.OUT, Std.ERR, Std.ALL)}
_ALLOWED = "0 (none), 1 (stdout), 2 (stderr) or 3 (both), or by local rank, as in 0:3,1:1"


def parse_std_choice(text: str, *, origin: str) -> StdChoice:
    """`3` for all ranks, or `0:3,12:1` for some and none for the others; any rank number, unlike torchrun's one digit.

    Args:
        text: the flag's value.
        origin: `--tee` or `PET_TEE`, for the error.

    Raises:
        UsageError: anything else.
    """
    if text in _WORDS:
        return StdChoice(default=_WORDS[text])
    by_rank: dict[int, Std] = {}
    for pair in text.split(","):
        rank, colon, choice = pair.partition(":")
        if not (colon and rank.isdecimal() and choice in _WORDS):
            raise UsageError(f"{origin} {text!r}: must be {_ALLOWED}")
        by_rank[int(rank)] = _WORDS[choice]
    return StdChoice(by_rank=by_rank)


def parse_ranks(text: str, *, origin: str) -> frozenset[int] | None:
    """`0,2` as a set of local ranks; None, which is all of them, for an empty text.

    Raises:
        UsageError: anything else.
    """
    if not text:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise UsageError(f"{origin} {text!r}: must be local ranks separated by commas, as in 0,2")
    return frozenset(int(word) for word in words)


def parse_texts(text: str) -> tuple[str, ...]:
    """Split texts at commas; `,,` is a comma within a text. An empty text gives no texts."""
    if not text:
        return ()
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(","))
