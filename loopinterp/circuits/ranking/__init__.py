"""Rival programs of any task, ranked by swaps of state on which they disagree."""
