"""Whether an engine is configured: `muster list` is silent about none."""

import pytest

from muster.schedulers.docker import sdk


@pytest.mark.parametrize(
    ("environ", "has_socket", "is_configured"),
    [
        ({}, False, False),
        ({"DOCKER_HOST": ""}, False, False),
        ({"DOCKER_HOST": "tcp://a"}, False, True),
        ({}, True, True),
    ],
)
def test_an_engine_is_configured_by_a_variable_or_a_socket(environ, has_socket, is_configured, monkeypatch, tmp_path):
    place = tmp_path / "docker.sock"
    if has_socket:
        place.touch()
    monkeypatch.setattr(sdk, "DEFAULT_HOST", f"unix://{place}")
    assert sdk.is_configured(environ) is is_configured
