"""Configuration of Sphinx; ``make docs`` builds the documentation, and warnings are errors."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import api_pages  # found by the path above

import hpcdist

project = "hpcdist"
author = "The hpcdist authors"
copyright = f"2026, {author}"  # Sphinx's name for it
release = version = hpcdist.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["config.cache"]

autodoc_typehints = "none"  # the signature has torch's own long types; the docstring says what they mean
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
add_module_names = False

html_theme = "furo"
html_title = f"hpcdist {release}"
html_static_path = ["_static"]
html_css_files = ["page.css"]
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
copybutton_exclude = ".linenos, .gp, .go"

CONTENTS = re.compile(r"<!-- contents:(.*?)-->", re.DOTALL)  # a comment, because GitHub shows directives as code


def write_contents(app: Any, page: str, source: list[str]) -> None:
    """Make a hidden table of contents of the comment that names a page's subpages."""
    source[0] = CONTENTS.sub(r"```{toctree}\n:hidden:\n\1\n```", source[0])


def setup(app: Any) -> None:
    """Have Sphinx call what this file adds to it."""
    app.connect("source-read", write_contents)


api_pages.write()
