"""What unit tests get besides: a person's default hold is not seen."""

from collections.abc import Iterator

import pytest

from muster._shared.holds import default


@pytest.fixture(autouse=True, scope="session")
def no_default_hold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Holds of this user are looked for below a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "_TMP", str(tmp_path_factory.mktemp("tmp")))
        patch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield
