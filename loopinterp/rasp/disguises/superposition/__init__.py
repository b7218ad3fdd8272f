"""Superposition: the same program in fewer dimensions, with a proof of what that costs.

``places`` says what may stand in the residual stream from layer to layer, ``program_reads`` what
is read there, ``interference`` bounds what happens to those reads along the directions of a
``frame``, ``search`` finds directions, ``rewriting`` moves the weights, and ``superposing`` and
``narrowing`` are what is asked for.
"""
