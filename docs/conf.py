"""Sphinx configuration; built by ``make docs``, where warnings are errors."""

from __future__ import annotations

import loopinterp

project = "loopinterp"
author = "The loopinterp contributors"
project_copyright = "2026, the loopinterp contributors"
version = release = loopinterp.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["colon_fence", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

# Docstrings are the reference; the types are in the signatures.
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"loopinterp {version}"
html_show_sourcelink = False
# The pages open without a network; formulas are the one thing that wants MathJax.
html_copy_source = False
