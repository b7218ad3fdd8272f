from .automaton_program import program_of as program_of
from .cell_automaton import CellAutomaton as CellAutomaton
from .decompilation import Decompiled as Decompiled
from .decompilation import decompile as decompile
from .transition_table import TransitionTable as TransitionTable
