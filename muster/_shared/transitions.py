"""The tables of the state machines: which phase accepts which event, what handles it, and which phases may follow.

Each reducer builds its table at its top, as h11 has one in `_state.py`. mypy proves two things. A handler takes the
event of its row. And no event of the closed union lacks a row: `+` adds the events of two tables, so that the type of
the sum names them all. Which phases follow is no part of a type, so a test checks that, with simulated histories
(`tests/unit/test_state_machines.py`). It also draws the table for the reducer's docstring.

A `match` over all events would take longer for the last of them; a table takes one look for each.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")
P = TypeVar("P")
S = TypeVar("S")

Phase = Any
"""A phase of a machine: its class if phases have values of their own, otherwise a member of an enum."""
Moves = Mapping[Phase, tuple[Phase, ...]]
"""The phases that accept an event, and for each those that may follow."""


class Table(dict[type, Mapping[Phase, tuple[Callable[..., Any], tuple[Phase, ...]]]], Generic[E, D]):
    """Rows for events of the types E, whose handlers decide as D: a state, and actions.

    By event and phase, it has the handler, and the phases that may follow.
    """

    def __add__(self, other: "Table[F, D]") -> "Table[E | F, D]":
        """Return the rows of both."""
        return Table({**self, **{kind: {**self.get(kind, {}), **row} for kind, row in other.items()}})

    def find(self, phase: Phase, event: E) -> Callable[..., D] | None:
        """Return what handles the event in this phase; None if the phase does not accept it.

        The event may be of a class that is derived from the row's.

        Raises:
            TypeError: no row is about such an event.
        """
        row = self.get(type(event)) or next((self[kind] for kind in type(event).__mro__ if kind in self), None)
        if row is None:
            raise TypeError(f"unexpected {event!r}")
        return row[phase][0] if phase in row else None


def on(event: type[E], handler: Callable[[S, E], D], *moves: Moves) -> Table[E, D]:
    """Make a row whose handler needs the state and the event only. Of moves for one phase the last counts."""
    return on_with(event, lambda state, event, *_: handler(state, event), *moves)


def on_with(event: type[E], handler: Callable[[S, E, C], D], *moves: Moves) -> Table[E, D]:
    """Make a row whose handler also needs what the reducer is called with besides: the time, or a plan."""
    return Table({event: {phase: (handler, then) for move in moves for phase, then in move.items()}})


def stay(*phases: Phase, or_go: tuple[Phase, ...] = ()) -> Moves:
    """Return that the machine stays in its phase, or changes to one of these others."""
    return {phase: (phase, *or_go) for phase in phases}


def go(*phases: Phase, to: tuple[Phase, ...]) -> Moves:
    """Return that the machine changes from each of these phases to one of the others."""
    return dict.fromkeys(phases, to)


def expect(phase: object, kind: type[P]) -> P:
    """Return the phase as one of this class, in a handler whose events the table accepts in no other phase."""
    if not isinstance(phase, kind):
        raise TypeError(f"expected {kind.__name__}, the phase is {phase!r}")
    return phase


def drop(state: S, phase: Phase, event: object) -> tuple[S, tuple[()]]:
    """Decide that nothing follows from an event that the phase does not accept, and record it at debug level.

    The record goes to `logging` if the process uses that. An agent does only with LOGLEVEL=DEBUG.
    """
    if (logging := sys.modules.get("logging")) is not None:
        logging.getLogger(__name__).debug("%s does not accept %r", getattr(phase, "__name__", phase), event)
    return state, ()
