"""What every test gets: a state folder of its own, so that no test sees, or leaves, a person's apps, and a Ctrl-C.

And what it leaves: the environment as it was.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from event_checks import check_events
from hypothesis import HealthCheck, settings

# A deadline is an assertion on wall-clock time: a loaded machine would fail tests that are right. The examples are the
# same each time; `make nightly` draws others (`--hypothesis-profile=random`).
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("muster", settings.get_profile("random"), derandomize=True, database=None)
settings.load_profile("muster")

# With it, what a test itself starts writes the parts of a `print` apart. An agent's workers always do, as with `-u`: a
# program whose ranks share one output writes each line, with its end, in one call, so that lines do not run together.
os.environ.pop("PYTHONUNBUFFERED", None)

# A shell that runs us in the background has two of them ignored, and nohup the third, and so would have every program
# that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for _ignored in (signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_ignored) is signal.SIG_IGN:
        signal.signal(_ignored, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="session")
def _own_state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("state-home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield folder
    check_events(folder)


@pytest.fixture(autouse=True)
def _checked_events(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever agents have written in the test's folder fits the public schema of event records."""
    yield
    folder = request.node.funcargs.get("tmp_path")
    if folder is not None and "/tests/unit/" not in str(request.node.path):
        check_events(folder)


@pytest.fixture(autouse=True)
def _kept_environment() -> Iterator[None]:
    """An agent's code that runs in the test's process sets variables for its own process: the next test must not see
    them.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        if name != "PYTEST_CURRENT_TEST":
            del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library with NVML's interface."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler here")
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    program = Path(__file__).parent / "programs" / "nvml_stand_in.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", path, program], check=True)
    return str(path)
