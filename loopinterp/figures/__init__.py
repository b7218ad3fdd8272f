"""The look of every figure: one Plotly template, one palette, shared pieces.

Text and backgrounds have no colours, to fit light and dark pages. Colours stay distinct under
colour blindness. Controls are grey and dashed.

    >>> from loopinterp.figures import Series, line_figure
    >>> figure = line_figure(
    ...     [Series("model", [8, 16], [1.0, 0.9], low=[0.99, 0.8], high=[1.0, 0.95])],
    ...     x_title="length (bits)", y_title="exact match", y_range=(0, 1.02))
    >>> [trace.name for trace in figure.data]
    ['model', 'model']
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
