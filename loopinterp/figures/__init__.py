"""The look of every figure: one Plotly template, one colour-blind-safe palette, shared pieces.

Figures are drawn without text or background colours (both are transparent or inherited), so
that the same figure reads well on a light and on a dark page. Colours of data were chosen to
keep a contrast of about 3 on white and on near-black, and to stay apart under simulated
protanopia, deuteranopia and tritanopia. Controls are grey and dashed everywhere.

    >>> from loopinterp.figures import Series, line_figure
    >>> figure = line_figure(
    ...     [Series("model", [8, 16], [1.0, 0.9], low=[0.99, 0.8], high=[1.0, 0.95])],
    ...     x_title="length (bits)", y_title="exact match", y_range=(0, 1.02))
    >>> [trace.name for trace in figure.data]
    ['model', 'model']
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
