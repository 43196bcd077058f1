"""The caches of compilers outlive their containers where that is asked for."""

import os
import time
from contextlib import ExitStack

import pytest
from torchx.specs import AppState

from muster.cli.prune import find_leftovers

pytestmark = pytest.mark.docker


@pytest.fixture
def cache(client):
    """The name of a cache that no other test uses."""
    name = f"test-{os.urandom(4).hex()}"
    yield name
    for volume in client.volumes.list(filters={"label": f"io.muster.cache={name}"}):
        volume.remove(force=True)


def test_a_cache_is_the_users_own_and_removed_by_prune(cache, apps, app_of, client):
    """Workers of any user write to it, also below a read-only root."""
    words = (
        'mkdir -p "$TORCHINDUCTOR_CACHE_DIR" && echo $TRITON_CACHE_DIR > "$TORCHINDUCTOR_CACHE_DIR/x" && echo written'
    )
    first = apps.run(app_of(words), compile_cache=cache, user="4242", read_only=True)
    assert apps.wait(first).state == AppState.SUCCEEDED, apps.logs(first)
    second = apps.run(
        app_of('cat "$TORCHINDUCTOR_CACHE_DIR/x"; echo $CUDA_CACHE_PATH'), compile_cache=cache, user="4242"
    )
    assert apps.wait(second).state == AppState.SUCCEEDED
    assert apps.logs(second) == ["/var/opt/muster-cache/triton\n", "/var/opt/muster-cache/cuda\n"]
    (volume,) = client.volumes.list(filters={"label": f"io.muster.cache={cache}"})

    def find():
        with ExitStack() as opened:
            found = find_leftovers(os.environ, ended_before_s=time.time(), opened=opened)
        return [each for each in found if volume.name in each.name]

    assert find() == [], "a container has it"
    apps.delete(first)
    apps.delete(second)
    (left,) = find()
    assert left.what == "compile caches that no container has"
    left.remove()
    assert client.volumes.list(filters={"label": f"io.muster.cache={cache}"}) == []
