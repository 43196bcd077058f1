"""Whether a process listens on a port, as the agent checks while global rank 0 has a head start."""

import socket

import pytest

from muster.agent.runtime.ports import PortReservation
from muster.agent.workers.warm.head_start import is_listening


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, ""), (socket.AF_INET6, "::"), (socket.AF_INET, "127.0.0.1")]
)
def test_a_listener_beside_the_reservation_is_found_and_the_reservation_does_not_count_as_one(
    family: socket.AddressFamily, host: str
) -> None:
    reservation = PortReservation()
    assert not is_listening(reservation.port)
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, reservation.port))
        assert not is_listening(reservation.port)
        server.listen()
        assert is_listening(reservation.port)
        assert is_listening(reservation.port)
        with socket.create_connection(("127.0.0.1", reservation.port)):  # it is not disturbed
            server.accept()[0].close()
    assert not is_listening(reservation.port)
    reservation.close()


def test_a_check_that_fails_counts_as_a_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socket", refuse)
    assert is_listening(29500)
