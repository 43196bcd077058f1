"""`make docs`: the site is built without a warning, and holds what is generated."""

import os
import subprocess
import sys

import doc_pages
import pytest


@pytest.mark.timeout(400)
def test_the_site_is_built_without_a_warning(tmp_path):
    source = doc_pages.copy_repository(tmp_path / "muster")
    words = ["-q", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "doctrees"), "docs", str(tmp_path / "site")]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *words],
        cwd=source, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    names = (page.removeprefix("docs/").replace(".md", ".html") for page in doc_pages.list_pages() if "/" in page)
    assert {*names, "reference/flags.html", "reference/options.html"} <= pages
    assert "should_stop" in (tmp_path / "site/worker-api.html").read_text()
    assert 'href="_static/blocks.css' in (tmp_path / "site/index.html").read_text()
    assert "Copyright &#169; 2026, the muster authors" in (tmp_path / "site/index.html").read_text()
    assert "<h3>--nnodes<" in (tmp_path / "site/reference/flags.html").read_text()  # no dash of typography
