"""What follows once `[project.urls]` of pyproject.toml has addresses: README's links, and the site's cards."""

import importlib.util
import re

import doc_pages
import pytest

ADDRESS = "https://code.example/muster"
PROJECT = f'[project.urls]\nRepository = "{ADDRESS}/"\n'


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_readme_work_on_a_package_index():
    setup = load(doc_pages.ROOT / "setup.py")
    readme = (doc_pages.ROOT / "README.md").read_text()
    assert setup.make_links_absolute(readme, 'name = "torchx-muster"') == readme
    text = setup.make_links_absolute(readme, PROJECT)
    assert f"]({ADDRESS}/raw/main/docs/static/recovery.svg)" in text
    assert f"[Figures]({ADDRESS}/blob/main/docs/comparison.md#figures)" in text
    targets = re.findall(r"\[[^\]]+\]\(([^)]+)\)", re.sub(r"`[^`]*`", "x", text))
    assert len(targets) > 20
    assert [each for each in targets if not each.startswith("https://")] == []


@pytest.mark.parametrize("addresses", [{}, {"Documentation": "https://docs.example"}])
def test_a_page_says_what_others_show_of_a_link_to_it(addresses):
    pytest.importorskip("sphinx")
    conf = load(doc_pages.ROOT / "docs" / "conf.py")
    context = {
        "title": "A <em>page</em>",
        "body": '<h1>A</h1><p>What &lt;it&gt;\n is <a href="x">about</a>.</p><p>More.</p>',
    }
    conf.add_card("hangs", context, addresses)
    tags = dict(re.findall(r'<meta (?:name|property)="([^"]+)" content="([^"]*)" />', context["metatags"]))
    assert tags["og:title"] == "A page"
    assert tags["description"] == "What &lt;it&gt; is about."
    assert tags.get("og:url") == ("https://docs.example/hangs.html" if addresses else None)
    image = "https://docs.example/_static/card.png" if addresses else None
    assert tags.get("og:image") == image
    assert (doc_pages.ROOT / "docs/static/card.png").exists()
