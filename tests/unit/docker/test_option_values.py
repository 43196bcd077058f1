"""Options that go to the engine as they are: what is accepted, what is refused, and the dry run."""

import pytest
import yaml
from docker_samples import parse_words
from torchx.specs import AppDef, Resource, Role

from muster.schedulers.docker.container_body import ImageFacts, build_body
from muster.schedulers.docker.request import RequestBuilder
from muster.schedulers.docker.spec import DEFAULT_SHM_BYTES, DEFAULT_ULIMITS, AppRequest
from muster.schedulers.errors import OptionError


def request_of(words="", *roles):
    made = roles or (role("train", 2, board=6006),)
    app = AppDef(name="job", roles=list(made))
    return RequestBuilder(app=app, options=parse_words(words), name="job-x", token="s3cret", user="0@here").build()


def role(name, replicas, **port_map):
    resource = Resource(cpu=1, gpu=0, memMB=0)
    return Role(name=name, image="img", entrypoint="sh", num_replicas=replicas, port_map=port_map, resource=resource)


def bindings(words, *roles):
    return [container.host_config.get("PortBindings") for container in request_of(words, *roles).containers]


def published(*ports, address="127.0.0.1"):
    return [{"HostIp": address, "HostPort": port} for port in ports]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("publish=80", [{"80/tcp": published("")}] * 2),
        ("publish=8000:80", [{"80/tcp": published("8000")}, {"80/tcp": published("8001")}]),
        ("publish=board", [{"6006/tcp": published("")}] * 2),
        ("publish=10.0.0.1:90:board/UDP", [{"6006/udp": published(port, address="10.0.0.1")} for port in ("90", "91")]),
        ("publish=[::1]:90:80", [{"80/tcp": published(port, address="::1")} for port in ("90", "91")]),
        ("publish=70:80;90:80", [{"80/tcp": published("70", "90")}, {"80/tcp": published("71", "91")}]),
        ("", [None, None]),
    ],
)
def test_ports(words, expected):
    assert bindings(words) == expected


def test_ports_of_several_roles():
    roles = (role("a", 2), role("b", 1, board=1), role("c", 2, board=2))
    named = [None, None, {"1/tcp": published("70")}, {"2/tcp": published("71")}, {"2/tcp": published("72")}]
    assert bindings("publish=70:board", *roles) == named
    assert bindings("publish=70:5", *roles) == [{"5/tcp": published(str(70 + k))} for k in range(5)]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("tmpfs=scratch", "tmpfs: 'scratch' is not PATH or PATH:SIZE, such as /scratch:8g"),
        ("tmpfs=/", "tmpfs: '/' is not PATH or PATH:SIZE"),
        ("tmpfs=/x:", "tmpfs: '/x:' is not PATH or PATH:SIZE"),
        ("tmpfs=/x:much", "tmpfs='much' is not a size above zero"),
        ("tmpfs=/opt", "tmpfs: '/opt' would hide muster's own files in /opt/muster or /var/opt/muster"),
        ("tmpfs=//opt", "tmpfs: '//opt' would hide muster's own files in /opt/muster or /var/opt/muster"),
        ("tmpfs=/var/opt/muster/logs", "would hide muster's own files"),
        ("publish=0", "publish: '0' is not PORT, HOST_PORT:PORT or ADDRESS:HOST_PORT:PORT with ports from 1 to 65535"),
        ("publish=70000:80", "publish: '70000:80' is not PORT"),
        ("publish=80/icmp", "publish: '80/icmp' is not PORT"),
        ("publish=1.2.3:80:80", "publish: '1.2.3:80:80': '1.2.3' is not an IP address"),
        ("publish=none", "publish: no role has a port 'none' in its port_map; there are: board"),
        (
            "publish=80,network=host",
            "publish: with network=host every port of a container is one of the host already; leave publish out",
        ),
        ("user=a b", "user='a b' is not USER or USER:GROUP, such as 1000:1000 or nobody"),
        ("user=a:", "user='a:' is not USER or USER:GROUP"),
        ("labels=io.muster.app:x", "labels: 'io.muster.app' begins with io.muster., as muster's own do"),
        ("labels=:x", "labels: '' is not a name"),
        ("labels=team", "option 'labels' of local_docker must be key:value pairs separated by ;, not 'team'"),
        ("log_driver=a b", "log_driver='a b' is not the name of a log driver such as json-file, local or journald"),
        ("log_opts=max-size", "option 'log_opts' of local_docker must be key:value pairs"),
        ("dns=server", "dns: 'server' is not an IP address"),
    ],
)
def test_refused_in_one_line(words, why):
    with pytest.raises(OptionError) as error:
        request_of(words)
    assert why in str(error.value)
    assert "\n" not in str(error.value)


def test_the_dry_run_shows_them_and_no_secret():
    words = "tmpfs=/scratch:1g,log_driver=splunk,log_opts=splunk-token:abc;tag:x,labels=team:a,user=7,dns=10.0.0.1"
    request = request_of(words)
    shown = yaml.safe_load(request.show())["containers"][0]
    assert shown["host_config"] == {
        "ShmSize": DEFAULT_SHM_BYTES,
        "Ulimits": [{"Name": name, "Soft": soft, "Hard": hard} for name, (soft, hard) in DEFAULT_ULIMITS.items()],
        "Tmpfs": {"/scratch": "exec,size=1073741824"},
        "LogConfig": {"Type": "splunk", "Config": {"splunk-token": "***", "tag": "x"}},
        "Dns": ["10.0.0.1"],
    }
    assert (shown["labels"], shown["user"]) == ({"team": "a"}, "7")
    assert AppRequest.from_json(request.to_json()) == request
    assert set(yaml.safe_load(request_of().show())["containers"][0]["host_config"]) == {"ShmSize", "Ulimits"}


def test_a_tmpfs_of_the_users_replaces_that_of_a_read_only_root():
    request = request_of("read_only=true,tmpfs=/tmp:1g")
    image = ImageFacts(id="x", working_dir="/", user="")
    body = build_body(request, request.containers[0], incarnation=0, image=image, cpus=4)
    assert body["HostConfig"]["Tmpfs"] == {"/tmp": "exec,size=1073741824"}
