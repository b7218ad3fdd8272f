"""Stage 3, lower: expressions as features of the residual stream, and what writes them.

``plan`` cuts the program into sections, ``section`` goes through a section's graph. ``attention``
and ``aggregates`` make heads, ``functions``, ``covers`` and ``lookups`` make MLPs; ``held``
collects what they write, and ``features`` are what is held in between.
"""
