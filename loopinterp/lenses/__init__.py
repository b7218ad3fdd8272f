"""Lenses: what a looped model attends to and reads out, loop by loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.lenses.attention_by_loop import AttentionResult as AttentionResult
    from loopinterp.lenses.attention_by_loop import attention_study as attention_study

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {"AttentionResult": ".attention_by_loop", "attention_study": ".attention_by_loop"}
)
