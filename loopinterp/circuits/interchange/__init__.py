"""Interchange interventions on the variables of any loop program, in any looped model."""
