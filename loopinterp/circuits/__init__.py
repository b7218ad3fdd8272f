"""Comparing a learned circuit with programs: decodability, heads, interchange, verdict."""

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.circuits.alignment import Alignment as Alignment
    from loopinterp.circuits.alignment import Prediction as Prediction
    from loopinterp.circuits.alignment import agreement as agreement
    from loopinterp.circuits.alignment import predict as predict
    from loopinterp.circuits.comparison import compare_programs as compare_programs
    from loopinterp.circuits.comparison_result import CircuitComparison as CircuitComparison
    from loopinterp.circuits.decoding import Decodability as Decodability
    from loopinterp.circuits.decoding import decodability as decodability
    from loopinterp.circuits.heads import HeadMatch as HeadMatch
    from loopinterp.circuits.heads import match_heads as match_heads
    from loopinterp.circuits.interchange.result import SWAPS as SWAPS
    from loopinterp.circuits.interchange.result import InterchangeResult as InterchangeResult
    from loopinterp.circuits.interchange.study import interchange_study as interchange_study
    from loopinterp.circuits.model_heads import head_study as head_study
    from loopinterp.circuits.pairs import PLACES as PLACES
    from loopinterp.circuits.pairs import SwapPairs as SwapPairs
    from loopinterp.circuits.pairs import swap_pairs as swap_pairs
    from loopinterp.circuits.partial_swaps import SubspaceSwaps as SubspaceSwaps
    from loopinterp.circuits.partial_swaps import subspace_study as subspace_study
    from loopinterp.circuits.patching.result import PatchingSweep as PatchingSweep
    from loopinterp.circuits.patching.sweep import patching_sweep as patching_sweep
    from loopinterp.circuits.program_model import ProgramModel as ProgramModel
    from loopinterp.circuits.ranking.result import ProgramRanking as ProgramRanking
    from loopinterp.circuits.ranking.study import rank_programs as rank_programs
    from loopinterp.circuits.runs import AT_THE_END as AT_THE_END
    from loopinterp.circuits.runs import SwapRun as SwapRun
    from loopinterp.circuits.runs import prepare_swaps as prepare_swaps
    from loopinterp.circuits.sections import head_name as head_name
    from loopinterp.circuits.verdict import NONE as NONE
    from loopinterp.circuits.verdict import Verdict as Verdict
    from loopinterp.circuits.verdict import decide as decide

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "AT_THE_END": ".runs",
        "Alignment": ".alignment",
        "CircuitComparison": ".comparison_result",
        "Decodability": ".decoding",
        "HeadMatch": ".heads",
        "InterchangeResult": ".interchange.result",
        "NONE": ".verdict",
        "PLACES": ".pairs",
        "PatchingSweep": ".patching.result",
        "Prediction": ".alignment",
        "ProgramModel": ".program_model",
        "ProgramRanking": ".ranking.result",
        "SWAPS": ".interchange.result",
        "SubspaceSwaps": ".partial_swaps",
        "SwapPairs": ".pairs",
        "SwapRun": ".runs",
        "Verdict": ".verdict",
        "agreement": ".alignment",
        "compare_programs": ".comparison",
        "decide": ".verdict",
        "decodability": ".decoding",
        "head_name": ".sections",
        "head_study": ".model_heads",
        "interchange_study": ".interchange.study",
        "match_heads": ".heads",
        "patching_sweep": ".patching.sweep",
        "predict": ".alignment",
        "prepare_swaps": ".runs",
        "rank_programs": ".ranking.study",
        "subspace_study": ".partial_swaps",
        "swap_pairs": ".pairs",
    },
)
