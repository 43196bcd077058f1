"""What `make docs` has built: a page of each source, and what is generated."""

import os
from pathlib import Path

import doc_pages
import pytest

SITE = os.environ.get("MUSTER_SITE")


@pytest.mark.skipif(SITE is None, reason="`make docs` builds the site, and runs this")
def test_the_site_has_all_pages_and_what_is_generated():
    site = Path(SITE or "")
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    written = (page for page in doc_pages.list_pages() if page.startswith("docs/"))
    names = (page.removeprefix("docs/").replace(".md", ".html") for page in written)
    assert {*names, "reference/flags.html", "reference/options.html"} <= pages
    assert "should_stop" in (site / "worker-api.html").read_text()
    assert 'href="_static/blocks.css' in (site / "index.html").read_text()
    assert "Copyright &#169; 2026, the muster authors" in (site / "index.html").read_text()
    assert ">--nnodes<" in (site / "reference/flags.html").read_text()  # no dash of typography
