"""Mechanistic interpretability of looped transformers, with every loop's activations open."""

from loopinterp._lazy import lazy_exports

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        name: f".{name}"
        for name in (
            "circuits",
            "dynamics",
            "lenses",
            "models",
            "plotting",
            "probing",
            "rasp",
            "report",
            "tasks",
            "training",
        )
    },
)
