"""Options and the pod_template patch: strict, offline, one line per error."""

import json

import pytest

from muster.schedulers.errors import OptionError, SchedulerError
from muster.schedulers.kubernetes.options import Options, parse_options
from muster.schedulers.kubernetes.schema import merge_pod_template
from muster.schedulers.runner.option_parsing import StrictOpts
from muster.schedulers.runner.option_records import declare_options

VERSION = (1, 37)


def test_torchx_own_options_keep_their_names():
    own = "namespace queue service_account priority_class image_repo validate_spec reserved_millicpu reserved_memmb"
    assert {*own.split(), "efa_device_count"} <= Options.__dataclass_fields__.keys()


def test_tolerations_as_the_command_line_can_pass_them():
    options = parse_options({"tolerations": ["gpu", "team:a", "team=a:NoSchedule", "x/y:NoExecute:60"]})
    assert options.tolerations == (
        {"key": "gpu", "operator": "Exists"},
        {"key": "team", "operator": "Equal", "value": "a"},
        {"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"},
        {"key": "x/y", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60},
    )


def test_labels_and_tolerations_may_be_spelled_as_for_kubectl():
    opts = StrictOpts("kubernetes")
    declare_options(opts, Options)
    text = "node_selector=pool=a100,tolerations=team=a:NoSchedule,labels=team=vision;cost:42"
    options = parse_options(opts.cfg_from_str(text))
    assert options.node_selector == {"pool": "a100"}
    assert options.tolerations == ({"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"},)
    assert options.labels == {"team": "vision", "cost": "42"}


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"quue": "x"}, "did you mean 'queue'"),
        ({"flavor": "jobs"}, "flavor='jobs' is not one of job, jobset"),
        ({"namespace": "Team"}, "namespace='Team' is not the name of a namespace"),
        ({"deadline_s": 0}, "deadline_s=0 is not a whole number from 1 to 2147483647"),
        ({"activeDeadlineSeconds": 60}, "no option 'activeDeadlineSeconds'; did you mean 'deadline_s'"),
        ({"ttlSecondsAfterFinished": 60}, "no option 'ttlSecondsAfterFinished'; did you mean 'ttl_s'"),
        ({"ttl_s": -1}, "ttl_s=-1 is not a whole number from 0 to 2147483647"),
        ({"shm_size": "lots"}, "shm_size='lots' is not a size such as 16Gi"),
        ({"tolerations": ["a:b:c"]}, r"tolerations: 'a:b:c' is not KEY"),
        (
            {"tolerations": ["nvidia.com/gpu::NoSchedule"]},
            "'nvidia.com/gpu::NoSchedule' has an empty value; 'nvidia.com/gpu:NoSchedule' tolerates every value",
        ),
        ({"tolerations": ["gpu="]}, "tolerations: 'gpu=' has an empty value; 'gpu' tolerates every value of gpu"),
        ({"resources": "x"}, "kubernetes has no option 'resources'; `torchx runopts kubernetes` lists all"),
        (
            {"node_selector": {"a": "b"}, "c": "d"},
            "no option 'c'; as a part of 'node_selector' write c:VALUE; `torchx runopts kubernetes` lists all",
        ),
        ({"queue": "a", "c": "d"}, "kubernetes has no option 'c'; `torchx runopts kubernetes` lists all"),
        ({"node_selector": {"a b": "c"}}, "node_selector: 'a b:c' is not a label of the form KEY:VALUE"),
        ({"labels": {"a b": "c"}}, "labels: 'a b:c' is not a label of the form KEY:VALUE"),
        ({"labels": {"cost..center/x": "c"}}, "labels: 'cost..center/x:c' is not a label of the form KEY:VALUE"),
        ({"labels": {"team": "-x"}}, "labels: 'team:-x' is not a label of the form KEY:VALUE"),
        ({"labels": {"app.kubernetes.io/instance": "x"}}, "labels: app.kubernetes.io/instance cannot be set: muster"),
        ({"labels": {"kueue.x-k8s.io/queue-name": "x"}}, "labels: kueue.x-k8s.io/queue-name cannot be set: muster"),
        ({"labels": {"batch.kubernetes.io/job-name": "x"}}, "labels: batch.kubernetes.io/job-name cannot be set"),
        ({"kube_version": "new"}, "kube_version=new is not a Kubernetes version such as 1.31"),
        ({"kube_version": "1.28"}, r"1\.29 or newer is needed .*kube_version is 1\.28"),
        ({"rdma": "4"}, "rdma=4 is not 'true' or DOMAIN/RESOURCE"),
        ({"rdma": "true", "security": "restricted"}, "security=restricted forbids"),
        *(
            ({"run_as": user}, rf"run_as='{user}' is not 'image', UID or UID:GID with numbers from 1 to 2147483647")
            for user in ("0", "root", "1000:0", "-1", "1:2:3", "2147483648", "1 ", "\u0661")
        ),
        ({"flavor": "jobset", "gang": "volcano"}, "gang=volcano cannot be used with flavor=jobset, which allows auto"),
        ({"gang": "kueue"}, "gang=kueue needs queue=NAME"),
        ({"queue": "q", "kueue_elastic": "some"}, "kueue_elastic='some' is not one of resize, partial"),
        ({"kueue_elastic": "partial"}, "kueue_elastic=partial is for flavor=job in a Kueue queue: give queue=NAME"),
        ({"queue": "q", "flavor": "jobset", "kueue_elastic": "partial"}, "kueue_elastic=partial is for flavor=job"),
        ({"gang": "none", "queue": "q"}, "queue=q cannot be used with gang=none"),
        ({"pod_template": "/nowhere/x.yaml"}, "No such file or directory; pass a file or inline JSON"),
        ({"pod_template": '{"spec": ['}, "is not YAML"),
        ({"pod_template": '{"containers": []}'}, "must be a mapping with spec, metadata or both"),
        ({"image_pull_secrets": ["No Such"]}, "image_pull_secrets='No Such' is not the name of a Secret"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(cfg, message):
    with pytest.raises(OptionError, match=message) as caught:
        parse_options(cfg)
    assert "\n" not in str(caught.value)


def test_pod_template_from_a_file(tmp_path):
    path = tmp_path / "pod.yaml"
    path.write_text("spec:\n  runtimeClassName: nvidia\n")
    assert parse_options({"pod_template": str(path)}).pod_template == {"spec": {"runtimeClassName": "nvidia"}}
    path.write_text(json.dumps({"metadata": {"labels": {"a": "b"}}}))
    assert parse_options({"pod_template": str(path)}).pod_template == {"metadata": {"labels": {"a": "b"}}}


# -- the patch --------------------------------------------------------------------------------------------------------


def template():
    return {
        "metadata": {"labels": {"a": "1"}},
        "spec": {
            "containers": [
                {
                    "name": "main",
                    "image": "img",
                    "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                    "volumeMounts": [{"name": "v", "mountPath": "/v"}],
                }
            ],
            "volumes": [{"name": "v", "emptyDir": {}}],
            "tolerations": [{"key": "k"}],
        },
    }


def merge(patch):
    before = template()
    merged = merge_pod_template(before, patch, VERSION)
    assert before == template(), "the arguments are not changed"
    return merged


def test_named_items_are_merged_by_name():
    container = {"name": "main", "env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]}
    merged = merge({"spec": {"containers": [container]}})
    assert merged["spec"]["containers"][0]["image"] == "img"
    assert [item["value"] for item in merged["spec"]["containers"][0]["env"]] == ["1", "3", "4"]


def test_a_second_container_is_added():
    merged = merge({"spec": {"containers": [{"name": "sidecar", "image": "s"}]}})
    assert [item["name"] for item in merged["spec"]["containers"]] == ["main", "sidecar"]


def test_a_volume_has_one_source():
    merged = merge({"spec": {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}})
    assert merged["spec"]["volumes"] == [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]


def test_other_lists_are_replaced_and_null_removes():
    merged = merge({"spec": {"tolerations": [{"key": "x"}]}, "metadata": {"labels": {"a": None, "b": "2"}}})
    assert merged["spec"]["tolerations"] == [{"key": "x"}]
    assert merged["metadata"]["labels"] == {"b": "2"}
    assert "volumes" not in merge({"spec": {"volumes": None}})["spec"]


def test_directives():
    deleted = merge({"spec": {"containers": [{"name": "main", "env": [{"name": "A", "$patch": "delete"}]}]}})
    assert deleted["spec"]["containers"][0]["env"] == [{"name": "B", "value": "2"}]
    fresh = [{"$patch": "replace"}, {"name": "Z", "value": "9"}]
    replaced = merge({"spec": {"containers": [{"name": "main", "env": fresh}]}})
    assert replaced["spec"]["containers"][0]["env"] == [{"name": "Z", "value": "9"}]


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (
            {"spec": {"nodeselector": {}}},
            r"pod_template\.spec\.nodeselector is not a field of PodSpec; did you mean nodeSelector\?",
        ),
        ({"spec": {"containers": [{"image": "x"}]}}, r"containers\[0\] must be a mapping with name"),
        (
            {"spec": {"containers": [{"name": "pytorch", "env": [{"name": "A", "value": "1"}]}]}},
            "pod_template adds a container 'pytorch' without an image; muster's container is 'main'",
        ),
        ({"spec": {"initContainers": [{"name": "i"}]}}, "pod_template adds a container 'i' without an image"),
        ({"spec": {"restartPolicy": "Always"}}, "restartPolicy cannot be set: the Job replaces pods itself"),
        ({"spec": {"subdomain": "x"}}, "subdomain cannot be set"),
        ({"spec": "x"}, r"pod_template\.spec must be a mapping, not 'x'"),
        ({"metadata": {"labels": ["x"]}}, r"labels must be a mapping, not \['x'\]"),
        ({"spec": {"volumes": {"name": "w"}}}, "volumes must be a list, not {'name': 'w'}"),
        (
            {"spec": {"containers": [{"name": "main", "$patch": "remove"}]}},
            "'remove' is not one of delete, merge, replace",
        ),
    ],
)
def test_a_wrong_patch_is_one_line_that_names_the_path(patch, message):
    with pytest.raises(SchedulerError, match=message) as caught:
        merge(patch)
    assert "\n" not in str(caught.value)


def test_a_field_of_another_version_is_refused():
    with pytest.raises(OptionError, match=r"schedulingGroup .* 1\.36 to 1\.37, .* 1\.31"):
        merge_pod_template(template(), {"spec": {"schedulingGroup": {"podGroupName": "x"}}}, (1, 31))
