"""The constructors of the contexts understand torch's arguments and older ones."""

import pytest

from muster.elastic.processes import GivenFiles, read_settings

FILES = tuple({0: name} for name in ("out", "err", "tee_out", "tee_err", "error"))
NAMES = dict(zip(GivenFiles._fields, FILES, strict=True))


def test_functions() -> None:
    for rest, named in (
        ((*FILES, "fork", {"cleared": 1}), {}),
        ((), {**NAMES, "start_method": "fork", "progbar_events": {"cleared": 1}}),
    ):
        older = read_settings(rest, named)
        assert (older.logs_specs, older.start_method, older.progbar_events) == (FILES, "fork", {"cleared": 1})
    specs = object()
    for rest, named in (
        (("fork", specs, {0: "p"}), {}),
        ((), {"logs_specs": specs, "start_method": "fork", "log_line_prefixes": {0: "p"}}),
    ):
        newer = read_settings(rest, named)
        assert (newer.start_method, newer.logs_specs, newer.log_line_prefixes) == ("fork", specs, {0: "p"})


def test_commands() -> None:
    for rest, named in ((FILES, {}), ((), NAMES)):
        assert read_settings(rest, named, is_command=True).logs_specs == FILES
    specs = object()
    newer = read_settings((specs,), {"numa_options": 1}, is_command=True)
    assert (newer.logs_specs, newer.numa_options) == (specs, 1)


def test_neither() -> None:
    with pytest.raises(TypeError, match="start_method"):
        read_settings(FILES, {})
    with pytest.raises(TypeError, match="logs_spec"):
        read_settings((), {"logs_spec": 1}, is_command=True)
    for rest, named in ((FILES, {"start_method": "fork"}), ((), {"start_method": "fork", "logs_specs": 1})):
        with pytest.raises(TypeError, match="start_method"):
            read_settings(rest, named, is_command=True)
