"""What is refused before any container is started."""

import pytest
from torchx.specs import AppDef, Resource, Role

from muster.schedulers.docker.container_body import ImageFacts
from muster.schedulers.docker.options import DockerOptions
from muster.schedulers.docker.request import WORKSPACE_KEY, RequestBuilder
from muster.schedulers.docker.running_apps.image_check import check_images
from muster.schedulers.docker.sdk import DockerError


class _Engine:
    """Starts nothing: a test that needs a container fails."""

    def info(self):
        return {"NCPU": 2}

    def inspect_image(self, _name):
        return ImageFacts(id="sha256:1", working_dir="/work/code", user="")


@pytest.mark.parametrize("image_repo", [None, "registry.example/built"])
@pytest.mark.parametrize("with_workspace", [(True, True), (False, True)])
def test_a_tmpfs_over_the_workspace_of_any_role_is_refused(tmp_path, image_repo, with_workspace):
    """It was not for a workspace built into the image, nor for the second role of an image."""
    roles = [
        Role(
            name=name,
            image="img",
            entrypoint="sh",
            resource=Resource(cpu=1, gpu=0, memMB=0),
            metadata={WORKSPACE_KEY: "key"} if has_workspace else {},
        )
        for name, has_workspace in zip("ab", with_workspace, strict=True)
    ]
    options = DockerOptions(image_repo=image_repo, tmpfs={"/work": "exec"})
    app = AppDef(name="job", roles=roles)
    app = RequestBuilder(app=app, options=options, name="job-x", token="s3cret", user="0@here").build()
    line = "^tmpfs: '/work' .* '/work/code'$"
    with pytest.raises(DockerError, match=line):
        check_images(_Engine(), app, tmp_path)
