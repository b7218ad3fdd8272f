"""Sphinx configuration; built by ``make docs``, where warnings are errors."""

from __future__ import annotations

import re
from typing import Any

import latex2mathml.converter
from docutils import nodes
from sphinx.util import logging

import loopinterp

project = "loopinterp"
author = "The loopinterp contributors"
project_copyright = "2026, the loopinterp contributors"
version = release = loopinterp.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
myst_enable_extensions = ["colon_fence", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
nb_execution_mode = "off"  # they are stored with what they show, and run by the tests
nb_merge_streams = True
copybutton_exclude = ".linenos, .gp, .go"

# Docstrings are the reference; the types are in the signatures.
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Arrays", "params_style")]
napoleon_attr_annotations = False  # a shape such as "*lead" would start an emphasis

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["guide.css"]
html_math_renderer = "mathml"
html_title = f"loopinterp {version}"
html_show_sourcelink = False
html_copy_source = False

_STARRED_SHAPE = re.compile(r"(?<!`)\[[^\]`]*\*\w[^\]`]*\](?!`)")


def _shapes_as_code(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """``[*grid, class]`` is a shape, not the start of an emphasis."""
    lines[:] = [_STARRED_SHAPE.sub(lambda shape: f"``{shape[0]}``", line) for line in lines]


def _skip_member(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """scikit-learn's metadata routing puts ``set_*_request`` on every estimator."""
    return True if re.fullmatch(r"set_\w+_request", name) else None


def _mathml(formula: str, display: str) -> str:
    """Formulas as MathML, which needs no script and no network."""
    converted = latex2mathml.converter.convert(formula, display=display)
    if "\\" in converted:
        logging.getLogger(__name__).warning("a command in this formula is unknown: %s", formula)
    return converted


def _inline_math(writer: Any, node: Any) -> None:
    writer.body.append(_mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def _display_math(writer: Any, node: Any) -> None:
    writer.body.append(f"<p>{_mathml(node.astext(), 'block')}</p>")
    raise nodes.SkipNode


def _no_page_of_builtins(app: Any, env: Any) -> None:
    """Viewcode lists ``builtins`` among the modules, but writes no page of it."""
    env._viewcode_modules.pop("builtins", None)


def setup(app: Any) -> None:
    app.connect("env-check-consistency", _no_page_of_builtins)
    app.add_html_math_renderer("mathml", (_inline_math, None), (_display_math, None))
    app.connect("autodoc-process-docstring", _shapes_as_code, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", _skip_member)
