"""Names of places in a run: layers around the loop, heads, and states after some loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loopinterp.models.model_config import LoopedTransformerConfig

PRELUDE, BLOCK, CODA = "prelude", "block", "coda"


def surround(config: LoopedTransformerConfig, n_loops: int) -> dict[str, range]:
    """TransformerLens' numbers of the layers that run once, by section.

    Example:
        >>> from loopinterp.models import LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(
        ...     d_model=8, n_heads=2, d_vocab=5, d_vocab_out=2, n_prelude=1, n_coda=2
        ... )
        >>> surround(config, n_loops=4)
        {'prelude': range(0, 1), 'coda': range(5, 7)}
    """
    total = config.layers_total(n_loops)
    return {PRELUDE: range(config.n_prelude), CODA: range(total - config.n_coda, total)}


def head_name(section: str, layer: int, head: int, *, n_layers: int) -> str:
    """What results call a head.

    Args:
        section: ``prelude``, ``block`` or ``coda``.
        layer: Its layer inside that section.
        head: Its index inside that layer.
        n_layers: Layers of the tied block; the layer is left out where there is but one.

    Example:
        >>> [head_name("block", 0, 3, n_layers=n) for n in (1, 2)]
        ['head 3', 'head 0.3']
        >>> head_name("coda", 0, 3, n_layers=1)
        'coda 0.3'
    """
    if section != BLOCK:
        return f"{section} {layer}.{head}"
    return f"head {head}" if n_layers == 1 else f"head {layer}.{head}"


def after(loop: int) -> str:
    """When a swap is made, in words.

    Example:
        >>> after(1), after(3)
        ('after 1 loop', 'after 3 loops')
    """
    return f"after {loop} loop" + ("s" if loop != 1 else "")
