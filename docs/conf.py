"""How Sphinx builds the site: `sphinx-build -W -n docs build/site`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

sys.path.insert(0, str(Path(__file__).parents[1]))

from raycore import __version__

project = "raycore"
copyright = "the raycore authors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["grafana"]
html_theme = "furo"
html_title = "raycore"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

default_role = "code"  # docstrings name code in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}

# names of other packages are not links, so that the build needs no network; nor are types that are not public
nitpick_ignore_regex = [
    (r"py:.*", r"(?!raycore\.|placement\.).*"),
    (r"py:class", r"raycore\.(\w+\._\w+|running_engine\.RunningEngine)"),
    (
        r"py:class",
        r"raycore\.(text|metrics|cache_layout|checkpoint|json_fields|config|models|plugins|client|messages|control|reasoning_tags|parts|server\.dialects\.responses|server\.contract\.engine)\..*",
    ),
]


_PAGES = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""The pages that have the text of files outside of this folder. Links name the files, which is right on GitHub."""


def setup(app: Sphinx) -> None:
    """Read sections such as `Args:` and `Raises:` in docstrings, and have links to files lead to their pages."""
    app.connect("autodoc-process-docstring", _read_sections)
    app.connect("source-read", _link_to_pages)


def _link_to_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    up = "../" * docname.count("/")
    for file, page in _PAGES.items():
        source[0] = re.sub(rf"\]\({re.escape(up)}\.\./{re.escape(file)}(?=[#)])", f"]({up}{page}", source[0])


def _read_sections(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    # the extension itself would take an attribute's text up to its first colon for a type
    if what not in ("attribute", "property", "data"):
        lines[:] = GoogleDocstring(lines, Config(napoleon_use_rtype=False), app, what, name, obj, options).lines()
