"""The objects of Kubernetes in SECURITY.md and docs/: valid by the published schemas, and for what we create."""

import doc_pages
import pytest
import yaml
from doubles.kubernetes_apps import find_pod_templates
from doubles.kubernetes_schemas import validate_published

from muster.components.dist import ddp
from muster.schedulers.kubernetes.manifests.request import build_request
from muster.schedulers.kubernetes.schema import load_table


def list_objects():
    blocks = [
        block for page in doc_pages.list_pages() for block in doc_pages.read_blocks(page) if block.language == "yaml"
    ]
    documents = [(block.where, document) for block in blocks for document in yaml.safe_load_all(block.text)]
    return [(where, document) for where, document in documents if "apiVersion" in document]


@pytest.mark.parametrize("version", ["1.29", ".".join(map(str, load_table().newest))])
@pytest.mark.parametrize(("where", "document"), [pytest.param(*each, id=each[0]) for each in list_objects()])
def test_an_object_of_the_documentation_is_valid(where, document, version):
    validate_published(document, version)


def select(policy):
    [source] = policy["spec"]["ingress"]
    return [policy["spec"]["podSelector"], *(each["podSelector"] for each in source["from"])]


@pytest.mark.parametrize("flavor", ["job", "jobset"])
def test_the_network_policy_is_for_the_pods_of_jobs(flavor):
    [policy] = [document for _, document in list_objects() if document["kind"] == "NetworkPolicy"]
    request = build_request(ddp(script="main.py", image="i", j="2x1"), {"flavor": flavor}, name="main-x1")
    labels = next(find_pod_templates(request.documents))["metadata"]["labels"]
    for selector in select(policy):
        assert selector["matchLabels"].items() <= labels.items()
    assert labels["app.kubernetes.io/instance"] == "main-x1", "the label that the page names for one job"
