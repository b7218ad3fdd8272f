"""Ablation on models whose circuit is known: is each head and MLP judged as the circuit says?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from loopinterp.benchmark.ground_truth_checks import Score
from loopinterp.circuits.ablated_parts import KINDS
from loopinterp.circuits.ablation_result import IDLE, NEEDED
from loopinterp.circuits.component_ablation import ablation_study
from loopinterp.rasp.expr import Aggregate, SelWidth, ShiftRight, Tokens
from loopinterp.rasp.node import postorder

if TYPE_CHECKING:
    import pandas as pd

    from loopinterp.benchmark.known_models import KnownModel
    from loopinterp.rasp.compiler.circuit import HeadNode, NeuronGroup
    from loopinterp.rasp.compiler.compiled import Compiled
    from loopinterp.rasp.expr import Seq
    from loopinterp.tasks.task import Batch

EXAMPLES = 128
ATTENTION = "attention"


def score_ablation(known: KnownModel, *, seed: int = 0) -> dict[str, Score]:
    """Of each kind of ablation, the share of parts that are judged as the circuit says."""
    if known.n_loops == 0 or not used_parts(known.compiled, informed=False):
        return {}  # no loop, or a program whose answer needs no part of the block
    judged = judged_by_ablation(known.compiled, known.batch[slice(0, EXAMPLES)], seed=seed)
    scores = {}
    for kind, table in judged.groupby("ablation", sort=False):
        # What calling every part needed would score.
        scores[f"ablated: {kind}"] = Score(
            float(table["right"].mean()), float(table["used"].mean())
        )
    return scores


def judged_by_ablation(compiled: Compiled, batch: Batch, *, seed: int = 0) -> pd.DataFrame:
    """Every part of which the circuit says something, judged by each kind of ablation.

    Args:
        compiled: The model with its circuit.
        batch: Inputs that it reads.
        seed: Of the ablations.

    Returns:
        :meth:`~loopinterp.circuits.AblationStudy.judged`, with ``used`` (whether the circuit says
        that the kind of ablation must show the part) and ``right`` (whether it is judged so).
    """
    circuit = compiled.circuit
    components = ("z", "mlp_out") if circuit.neurons else ("attn_out",)
    study = ablation_study(compiled.model, batch, components=components, when=("all",), seed=seed)
    table = study.judged()
    says = {kind: used_parts(compiled, informed=kind != "zero") for kind in KINDS}
    used = [part in says[kind] for part, kind in zip(table["part"], table["ablation"])]
    expected = [NEEDED if x else IDLE for x in used]
    return table.assign(used=used, right=table["need"] == expected)


def used_parts(compiled: Compiled, *, informed: bool) -> set[str]:
    """The heads and MLPs of the block that the answer depends on, as the circuit says.

    A part is used if something that it writes leads to the answer. Where a part is given another
    example's activation, or the mean, only what depends on the tokens can differ: a counter of
    loops, or a head between positions alone, is used and carries no information.

    Args:
        compiled: The model with its circuit; of one whose weights were trained, which has no heads
            and MLPs, attention as a whole is used if the step reads another position.
        informed: Only parts that write what depends on the tokens.
    """
    circuit, program = compiled.circuit, compiled.program
    if not circuit.neurons:
        return {f"{ATTENTION} 0"} if _reads_elsewhere(program) else set()
    ids = {name: feature.id for name, feature in circuit.variables.items()}
    nodes = {node.id for node in (*circuit.heads, *circuit.neurons)}
    answer = {ids[name] for name in program.finish.variables}
    used = _closed(answer, [(to, sender) for sender, to in circuit.edges])
    first = {ids[name] for name, x in program.prepare.items() if _reads_tokens(x)}
    told = _closed({"tokens", *first}, circuit.edges)
    writes = {
        node for node, feature in circuit.edges
        if node in nodes and feature in used and (feature in told or not informed)
    }  # fmt: skip
    heads = {f"head {h.layer}.{h.head}" for h in circuit.heads if _in_block(h) and h.id in writes}
    return heads | {f"MLP {g.layer}" for g in circuit.neurons if _in_block(g) and g.id in writes}


def _in_block(node: HeadNode | NeuronGroup) -> bool:
    return node.section == "block"


def _closed(start: set[str], edges: Iterable[tuple[str, str]]) -> set[str]:
    """All nodes to which edges lead from some of them, themselves among them."""
    following: dict[str, list[str]] = {}
    for sender, to in edges:
        following.setdefault(sender, []).append(to)
    seen, left = set(start), [*start]
    while left:
        for node in following.get(left.pop(), []):
            if node not in seen:
                seen.add(node)
                left.append(node)
    return seen


def _reads_tokens(x: Seq) -> bool:
    return any(isinstance(node, Tokens) for node in postorder([x]))


def _reads_elsewhere(program: LoopProgram) -> bool:
    """Whether a loop of the program reads another position."""
    others = (ShiftRight, Aggregate, SelWidth)
    return any(isinstance(node, others) for node in postorder(program.step.values()))
