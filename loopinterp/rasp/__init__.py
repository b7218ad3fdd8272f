"""RASP-L as an embedded language: expressions, an interpreter, loop programs, a compiler."""

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.rasp.compiler.agreement import Agreement as Agreement
    from loopinterp.rasp.compiler.agreement import compare_with_program as compare_with_program
    from loopinterp.rasp.compiler.circuit import Circuit as Circuit
    from loopinterp.rasp.compiler.circuit import Superposition as Superposition
    from loopinterp.rasp.compiler.compiled import Compiled as Compiled
    from loopinterp.rasp.compiler.compiled import compile_program as compile_program
    from loopinterp.rasp.counts import CeilLog2 as CeilLog2
    from loopinterp.rasp.counts import Linear as Linear
    from loopinterp.rasp.diagram import draw as draw
    from loopinterp.rasp.disguises.disguise_check import DisguiseCheck as DisguiseCheck
    from loopinterp.rasp.disguises.disguise_check import check_disguise as check_disguise
    from loopinterp.rasp.disguises.distractors import distract as distract
    from loopinterp.rasp.disguises.noise import add_noise as add_noise
    from loopinterp.rasp.disguises.permutation import permute as permute
    from loopinterp.rasp.disguises.rotation import rotate as rotate
    from loopinterp.rasp.disguises.superposition import (
        narrowest_superposition as narrowest_superposition,
    )
    from loopinterp.rasp.disguises.superposition import superpose as superpose
    from loopinterp.rasp.expr import Selector as Selector
    from loopinterp.rasp.expr import Seq as Seq
    from loopinterp.rasp.interpreter import evaluate as evaluate
    from loopinterp.rasp.language import UNKNOWN as UNKNOWN
    from loopinterp.rasp.language import aggregate as aggregate
    from loopinterp.rasp.language import eq as eq
    from loopinterp.rasp.language import full as full
    from loopinterp.rasp.language import indices as indices
    from loopinterp.rasp.language import kqv as kqv
    from loopinterp.rasp.language import larger as larger
    from loopinterp.rasp.language import ne as ne
    from loopinterp.rasp.language import sel_width as sel_width
    from loopinterp.rasp.language import select as select
    from loopinterp.rasp.language import seq_map as seq_map
    from loopinterp.rasp.language import shift_right as shift_right
    from loopinterp.rasp.language import smaller as smaller
    from loopinterp.rasp.language import tok_map as tok_map
    from loopinterp.rasp.language import tokens as tokens
    from loopinterp.rasp.language import var as var
    from loopinterp.rasp.language import where as where
    from loopinterp.rasp.library import aggr as aggr
    from loopinterp.rasp.library import argmax as argmax
    from loopinterp.rasp.library import argmin as argmin
    from loopinterp.rasp.library import binary_mode as binary_mode
    from loopinterp.rasp.library import cumsum as cumsum
    from loopinterp.rasp.library import first_true as first_true
    from loopinterp.rasp.library import firsts as firsts
    from loopinterp.rasp.library import has_seen as has_seen
    from loopinterp.rasp.library import index_select as index_select
    from loopinterp.rasp.library import induct as induct
    from loopinterp.rasp.library import induct_kqv as induct_kqv
    from loopinterp.rasp.library import induct_prev as induct_prev
    from loopinterp.rasp.library import lasts as lasts
    from loopinterp.rasp.library import mask as mask
    from loopinterp.rasp.library import maximum as maximum
    from loopinterp.rasp.library import minimum as minimum
    from loopinterp.rasp.library import mode as mode
    from loopinterp.rasp.library import num_prev as num_prev
    from loopinterp.rasp.node import Expr as Expr
    from loopinterp.rasp.program import LoopProgram as LoopProgram
    from loopinterp.rasp.registry import get_program as get_program
    from loopinterp.rasp.registry import list_programs as list_programs
    from loopinterp.rasp.registry import register_program as register_program
    from loopinterp.rasp.trace import Intervention as Intervention
    from loopinterp.rasp.trace import Trace as Trace
    from loopinterp.rasp.trace import counterfactual as counterfactual

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Agreement": ".compiler.agreement",
        "CeilLog2": ".counts",
        "Circuit": ".compiler.circuit",
        "Compiled": ".compiler.compiled",
        "DisguiseCheck": ".disguises.disguise_check",
        "Expr": ".node",
        "Intervention": ".trace",
        "Linear": ".counts",
        "LoopProgram": ".program",
        "Selector": ".expr",
        "Seq": ".expr",
        "Superposition": ".compiler.circuit",
        "Trace": ".trace",
        "UNKNOWN": ".language",
        "add_noise": ".disguises.noise",
        "aggr": ".library",
        "aggregate": ".language",
        "argmax": ".library",
        "argmin": ".library",
        "binary_mode": ".library",
        "check_disguise": ".disguises.disguise_check",
        "compare_with_program": ".compiler.agreement",
        "compile_program": ".compiler.compiled",
        "counterfactual": ".trace",
        "cumsum": ".library",
        "distract": ".disguises.distractors",
        "draw": ".diagram",
        "eq": ".language",
        "evaluate": ".interpreter",
        "first_true": ".library",
        "firsts": ".library",
        "full": ".language",
        "get_program": ".registry",
        "has_seen": ".library",
        "index_select": ".library",
        "indices": ".language",
        "induct": ".library",
        "induct_kqv": ".library",
        "induct_prev": ".library",
        "kqv": ".language",
        "larger": ".language",
        "lasts": ".library",
        "list_programs": ".registry",
        "mask": ".library",
        "maximum": ".library",
        "minimum": ".library",
        "mode": ".library",
        "narrowest_superposition": ".disguises.superposition",
        "ne": ".language",
        "num_prev": ".library",
        "permute": ".disguises.permutation",
        "register_program": ".registry",
        "rotate": ".disguises.rotation",
        "sel_width": ".language",
        "select": ".language",
        "seq_map": ".language",
        "shift_right": ".language",
        "smaller": ".language",
        "superpose": ".disguises.superposition",
        "tok_map": ".language",
        "tokens": ".language",
        "var": ".language",
        "where": ".language",
    },
)
