"""`muster-agent ask job`: asks the agent of this node, or of any node on this machine, and prints the answer."""

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import BinaryIO

from muster._shared.codec import decode, encode
from muster._shared.contract import AskKind, AskOutcome, Env, print_line
from muster._shared.reports import Answer
from muster.agent.control.address import (
    LEAST_LIMIT_S,
    MOST_LIMIT_S,
    Greeting,
    SignedRequest,
    is_same_user,
    list_addresses,
    sign,
)

ANSWERED, NOT_ANSWERED, MISUSE, SILENT = 0, 3, 2, 4
"""Exit codes."""

USAGE = """\
usage: muster-agent ask job {stop|checkpoint|pause|resume|stacks|reach} [--limit SECONDS]

Asks the job that this node belongs to, and prints the answer as one line of JSON. `muster` runs it on a node of the
job, where the environment has the job's token.

  --limit S    how long the ranks may take (default: 60)

exit code: 0 the answer was printed, 2 wrong usage, 3 no agent of the job is here, 4 one is, and does not answer
"""

DEFAULT_LIMIT_S = 60.0
APPEAR_S = 8.0
"""How long to wait for an agent that has just been started."""
GREETING_S = 3.0
"""How long an agent may take to greet. A stopped one does not greet."""
MARGIN_S = 20.0
"""How much longer than the limit of the request the answer may take."""
_ANSWER_LIMIT_BYTES = 16 << 20


class _Misuse(Exception):
    """One line for the user."""


class _SilentError(Exception):
    """This agent does not greet, but another one may."""


def main(args: Sequence[str]) -> int:
    """Ask, print the answer, and return the exit code."""
    try:
        kind, limit_s = _parse(args)
    except _Misuse as error:
        print_line(f"muster: {error}\n{USAGE}")
        return MISUSE
    token = os.environ.get(Env.TOKEN)
    if not token:
        print_line(f"muster: {Env.TOKEN} is not set: only an adapter can ask")
        return NOT_ANSWERED
    try:
        answer = _ask_any(token, kind, limit_s)
    except _SilentError:
        sys.stderr.write("muster: an agent of the job is here, and does not answer\n")
        return SILENT
    if answer is None:
        sys.stderr.write("muster: no agent of the job answers here\n")
        return NOT_ANSWERED
    sys.stdout.write(f"{answer}\n")
    return ANSWERED


def _parse(args: Sequence[str]) -> tuple[AskKind, float]:
    kinds = {each.value: each for each in AskKind}
    if not args or args[0] not in kinds:
        what = repr(args[0]) if args else "nothing"
        raise _Misuse(f"ask job {what}: must be one of {', '.join(kinds)}")
    if len(args) == 1:
        return kinds[args[0]], DEFAULT_LIMIT_S
    if len(args) != 3 or args[1] != "--limit":
        raise _Misuse(f"ask job {args[0]}: unknown argument {args[1]!r}")
    try:
        limit_s = float(args[2])
    except ValueError:
        limit_s = -1.0
    if not LEAST_LIMIT_S <= limit_s <= MOST_LIMIT_S:
        raise _Misuse(f"ask job --limit {args[2]!r}: must be a number from {LEAST_LIMIT_S:g} to {MOST_LIMIT_S:g}")
    return kinds[args[0]], limit_s


def _ask_any(token: str, kind: AskKind, limit_s: float) -> str | None:
    """Ask the first agent that greets; return None if there is none.

    Raises:
        _SilentError: there are some, and none greets.
    """
    deadline_s = time.monotonic() + (0.0 if kind is AskKind.REACH else APPEAR_S)
    while True:
        silent: _SilentError | None = None
        for address in list_addresses(token):
            try:
                return _ask_one(address, token, kind, limit_s)
            except _SilentError as error:  # noqa: PERF203  # another one may greet
                silent = error
            except OSError:  # it has just ended, or another user has taken its name
                continue
        if time.monotonic() >= deadline_s:
            if silent is not None:
                raise silent
            return None
        time.sleep(0.1)


def _ask_one(address: bytes, token: str, kind: AskKind, limit_s: float) -> str:
    """Ask one agent, and return its answer as JSON.

    Raises:
        _SilentError: the agent does not greet, so nothing was asked.
        OSError: the agent cannot be reached, or it is another user's.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(GREETING_S)
        link.connect(address)
        if not is_same_user(link):
            raise PermissionError
        with link.makefile("rb") as lines:
            try:
                greeting = decode(Greeting, json.loads(lines.readline(4096)))
            except (ValueError, RecursionError, OSError):
                raise _SilentError from None
            signature = sign(token, greeting.nonce, kind, limit_s)
            request = SignedRequest(kind=kind, limit_s=limit_s, signature=signature)
            link.sendall(encode(request, 4096).encode() + b"\n")
            link.settimeout(limit_s + MARGIN_S)
            return _read_answer(lines, limit_s)


def _read_answer(lines: BinaryIO, limit_s: float) -> str:
    """Return the answer, or one that says why there is none; the request may have been carried out."""
    try:
        line = lines.readline(_ANSWER_LIMIT_BYTES)
    except TimeoutError:
        return _build_answer(AskOutcome.UNREACHED, f"the job gave no answer in {limit_s + MARGIN_S:g} s")
    except OSError:
        line = b""
    if not line.endswith(b"\n"):
        return _build_answer(AskOutcome.LOST, "the agent that was asked ended before it could answer")
    return line.decode().rstrip("\n")


def _build_answer(outcome: AskOutcome, line: str) -> str:
    return encode(Answer(outcome=outcome, line=line), _ANSWER_LIMIT_BYTES)
