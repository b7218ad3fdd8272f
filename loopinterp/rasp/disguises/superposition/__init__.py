"""Superposition: the same program in fewer dimensions, with a proof of what that costs.

``places`` says what may stand in the residual stream from layer to layer, ``program_reads`` what
is read there, ``frame`` chooses the directions, ``interference`` bounds what they do to reads,
and ``superposing`` writes the model.
"""
