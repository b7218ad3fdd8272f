"""What keeps strings of saved files from doing anything on a page: policy, data, figure text."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from functools import cache

from markupsafe import Markup

# Plotly reads tags in its text; ours use these, without attributes, and no others pass.
_OTHER_TAG = re.compile(r"<(?!(?:/?(?:b|i|sub|sup|extra)|br/?)>)")
_BIDI_CONTROLS = {c: f"⟨{c:04x}⟩" for c in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_POLICY = Markup('<meta http-equiv="Content-Security-Policy" content="{}">')


def security_policy(scripts: Iterable[str]) -> Markup:
    """The ``meta`` element that lets a page run these scripts and no other, and ask for nothing.

    Styles stay inline: Plotly sets them on the elements that it draws.

    Args:
        scripts: The text of every script that the page may run.

    Example:
        >>> "script-src 'sha256-" in security_policy(["1"])
        True
    """
    allowed = " ".join(dict.fromkeys(_source(script) for script in scripts)) or "'none'"
    return _POLICY.format(
        Markup(
            f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
            "img-src data: blob:; base-uri 'none'; form-action 'none'"
        )
    )


@cache
def _source(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def script_json(text: str) -> Markup:
    """JSON that cannot end its own script element.

    Example:
        >>> script_json('["</script>"]')
        Markup('["\\\\u003c/script>"]')
    """
    return Markup(text.replace("<", "\\u003c"))


def figure_markup(text: str) -> str:
    """Text of a figure, or its JSON: a tag that Plotly would read is shown, but for bare ``<b>``.

    Example:
        >>> figure_markup("<b>loop</b> <a href='x'>")
        "<b>loop</b> &lt;a href='x'>"
    """
    return _OTHER_TAG.sub("&lt;", text)


def visible_controls(text: str) -> str:
    """A text whose direction-changing characters are written out, so that they change nothing.

    Example:
        >>> visible_controls("a\\u202eb")
        'a⟨202e⟩b'
    """
    return text.translate(_BIDI_CONTROLS)
