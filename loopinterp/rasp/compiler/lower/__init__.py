"""Stage 3, lower: expressions as features of the residual stream, and what writes them.

``program_lowering`` cuts the program into sections, ``section_lowering`` goes through a section's
graph. ``attention_relation`` and ``aggregate_heads`` make heads, ``feature_functions``,
``decision_rules`` and ``mlp_lookups`` make MLPs; ``feature_writer`` has layers write
``lowered_features``.
"""
