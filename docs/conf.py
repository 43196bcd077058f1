"""How Sphinx builds the site: `make docs`. MyST reads the pages, `reference_pages` writes those of the reference."""

import re
import sys
from html import escape, unescape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))
sys.path.insert(0, str(DOCS.parent))

from muster import __version__  # noqa: E402

project = "muster"
author = "the authors of muster"
project_copyright = "2026, the muster authors"  # as in LICENSE
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "reference_pages"]
html_theme = "furo"
html_title = f"muster {__version__}"
html_static_path = ["static"]
html_css_files = ["blocks.css"]
html_js_files = ["copy.js"]
smartquotes = False  # it makes a dash of the two hyphens of a flag
exclude_patterns = ["_build"]

PROJECT = (DOCS.parent / "pyproject.toml").read_text()
ADDRESSES = dict(re.findall(r'^(Repository|Documentation) = "(https://[^"]+?)/?"$', PROJECT, re.MULTILINE))
"""Of `[project.urls]`: set them there. Edit links and the social card follow."""
if "Repository" in ADDRESSES:
    html_theme_options = {
        "source_repository": f"{ADDRESSES['Repository']}/", "source_branch": "main", "source_directory": "docs/",
    }  # fmt: skip
if "Documentation" in ADDRESSES:
    html_baseurl = f"{ADDRESSES['Documentation']}/"

INCLUDED = {"../SECURITY.md": "security.md", "../CONTRIBUTING.md": "working-on-it.md", "../CHANGELOG.md": "changes.md"}
"""Files beside `docs`, and the pages that include them. Pages link to the files, which a checkout shows."""

nitpicky = False  # signatures name torch's and TorchX's classes, whose documentation is not reachable from here
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False


def setup(app: Any) -> None:
    """Register the callbacks, as Sphinx asks."""
    app.connect("source-read", lambda _app, _page, source: source.__setitem__(0, link_to_pages(source[0])))
    app.connect("html-page-context", lambda _app, page, _template, context, _tree: add_card(page, context))
    app.connect("html-page-context", lambda _app, _page, _template, context, _tree: mark_short_words(context))


def link_to_pages(text: str) -> str:
    """Let links to files beside `docs` lead to the pages of the site that include them."""
    return re.sub(r"\]\(([^)#\s]+)", lambda found: f"]({INCLUDED.get(found[1], found[1])}", text)


def mark_short_words(context: dict[str, Any]) -> None:
    """Mark words of code that fit on a line of a phone, so that `blocks.css` keeps them whole."""
    body = context.get("body") or ""
    context["body"] = re.sub(r'<span class="pre">([^<]{1,24})</span>', r'<span class="pre short">\1</span>', body)


def add_card(page: str, context: dict[str, Any], addresses: dict[str, str] = ADDRESSES) -> None:
    """Say what others show of a link to this page; they show a picture only by its whole address."""
    title = unescape(re.sub(r"<[^>]*>", "", context.get("title") or project))
    words = {"og:type": "article", "og:site_name": project, "og:title": title, "twitter:card": "summary_large_image"}
    text = re.sub(r"<[^>]*>", "", " ".join(re.findall(r"<p>(.*?)</p>", context.get("body") or "", re.DOTALL)[:1]))
    if text:
        words["og:description"] = words["description"] = " ".join(unescape(text).split())[:200]
    if "Documentation" in addresses:
        words["og:url"] = f"{addresses['Documentation']}/{page}.html"
        words["og:image"] = f"{addresses['Documentation']}/_static/card.png"
        words |= {"og:image:width": "1200", "og:image:height": "630"}
        words["og:image:alt"] = (
            "muster starts, supervises and heals distributed PyTorch jobs; three figures beside torchrun's"
        )
    tags = (
        f'<meta {"name" if name == "description" else "property"}="{name}" content="{escape(value)}" />'
        for name, value in words.items()
    )
    context["metatags"] = context.get("metatags", "") + "\n".join(tags)
