from .automaton_program import program_of as program_of
from .cell_automaton import CellAutomaton as CellAutomaton
from .decompilation import Decompiled as Decompiled
from .decompilation import decompile as decompile
from .decompilation_study import Decompilation as Decompilation
from .decompilation_study import decompilation_study as decompilation_study
from .response_times import response_times as response_times
from .transition_table import TransitionTable as TransitionTable
