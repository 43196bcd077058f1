"""What unit tests of the Docker adapter are about: options, requests and containers as an engine describes them."""

from muster.schedulers.docker.engine import ContainerFacts
from muster.schedulers.docker.options import DockerOptions
from muster.schedulers.docker.spec import AppRequest, ContainerRequest
from muster.schedulers.runner.option_parsing import StrictOpts
from muster.schedulers.runner.option_records import declare_options, parse_options


def parse_words(words=""):
    """The options of `-cfg WORDS`."""
    opts = StrictOpts("local_docker")
    declare_options(opts, DockerOptions)
    return parse_options(DockerOptions, opts, opts.cfg_from_str(words))


def build_container(**more):
    fields = {"role": "w", "replica": 0, "image": "img", "name": "a-w-0", "command": ("python3", "x"), "env": {}}
    fields |= {"hostname": "w-0", "aliases": (), "runs_agent": True, "bundled": True}
    return ContainerRequest(**fields | more)


def build_app(*containers):
    fields = {"app_id": "a", "network": "net", "owns_network": False, "pull": "missing", "grace_s": 1.0}
    return AppRequest(**fields, keep="all", user="u", containers=containers)


def build_facts(**more):
    fields = {"id": "c", "name": "c", "labels": {}, "status": "exited", "exit_code": 1, "oom_killed": False}
    return ContainerFacts(**fields | {"error": "", "started_at": "", "finished_at": ""} | more)
