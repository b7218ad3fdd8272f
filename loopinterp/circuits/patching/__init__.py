"""Patching sweeps: activations of one run put into another, place by place and loop by loop."""
