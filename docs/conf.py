"""How Sphinx builds the site: `make docs`. MyST reads the pages, `reference_pages` writes those of the reference."""

import sys
from pathlib import Path

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
smartquotes = False  # it makes a dash of the two hyphens of a flag
exclude_patterns = ["_build"]

nitpicky = False  # signatures name torch's and TorchX's classes, whose documentation is not reachable from here
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
