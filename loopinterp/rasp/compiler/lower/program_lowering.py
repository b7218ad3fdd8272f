"""Stage 3, lower: the program as three sections over persistent features.

The prelude computes what reads no variable, once: ``prepare``, and what ``step`` and ``finish``
need that stays the same. The block is ``step``, the coda is ``finish``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from loopinterp.rasp.compiler.lower.feature_functions import FeatureFunction, of_feature
from loopinterp.rasp.compiler.lower.lowered_features import Feature
from loopinterp.rasp.compiler.lower.section_lowering import SectionLowering
from loopinterp.rasp.compiler.validate import ValidatedProgram
from loopinterp.rasp.compiler.value_domains import Values
from loopinterp.rasp.expr import Aggregate, Indices, SelWidth, Seq, Tokens, Var
from loopinterp.rasp.node import Expr, code, postorder


@dataclass(eq=False)
class LoweredSection:
    """What a section computes: the features that are needed, in the order in which they were made.

    ``targets`` are those that it writes in place of persistent ones -> these.
    """

    name: str
    n_layers: int
    live: list[Feature]
    targets: Mapping[Feature, Feature]


@dataclass(frozen=True, eq=False)
class LoweredProgram:
    """What is computed, and by which section.

    Persistent features have coordinates of their own; ``embedded`` are the variables whose value
    before the first loop the embedding gives; ``answer`` is what the unembedding reads.
    """

    source: ValidatedProgram
    persistent: list[Feature]
    embedded: Mapping[Feature, FeatureFunction]
    prelude: LoweredSection
    block: LoweredSection
    coda: LoweredSection
    answer: FeatureFunction

    @property
    def sections(self) -> tuple[LoweredSection, LoweredSection, LoweredSection]:
        """In the order in which they run."""
        return self.prelude, self.block, self.coda


def lower_program(source: ValidatedProgram, domains: Mapping[Expr, Values]) -> LoweredProgram:
    """Lower a program.

    Raises:
        InputError: an expression cannot be looked up by one layer; the message names it.
    """
    tokens = Feature("tokens", tuple(range(len(source.program.inputs))), "tokens")
    indices = Feature("indices", tuple(range(source.max_length)), "indices")
    inputs = {Tokens(): of_feature(tokens), Indices(): of_feature(indices)}
    variables = {
        name: Feature(name, tuple(domains[Var(name)].tolist()), "variable")
        for name in source.prepare
    }

    prelude = SectionLowering("prelude", source, domains, inputs, indices)
    embedded, targets = _prepare(source, prelude, variables, (tokens, indices))
    fixed: dict[Expr, Feature] = {}
    for node in _constant_nodes(source):
        function, name = prelude.function(node), code(node, short=True)
        fixed[node] = Feature(name, function.values, "fixed")
        targets[prelude.writer.store(function, name, role="fixed")] = fixed[node]

    held = {**fixed, **{Var(name): feature for name, feature in variables.items()}}
    known = {**inputs, **{node: of_feature(feature) for node, feature in held.items()}}
    block = SectionLowering("block", source, domains, known, indices)
    next_state: dict[Feature, Feature] = {}
    becomes = {name: block.function(x) for name, x in source.step.items()}
    for name, function in becomes.items():
        what, variable = f"step, {name} = {source.step[name]!r}", variables[name]
        written = block.writer.store(function, what, role="variable", values=variable.values)
        next_state[written] = variable

    coda = SectionLowering("coda", source, domains, known, indices)
    answer = coda.function(source.finish)
    name = f"answer: {code(source.finish, short=True)}"
    if not answer.for_attention:
        answer = of_feature(coda.writer.store(answer, name))
    if _is_rough(answer, {variable: written for written, variable in next_state.items()}):
        answer = of_feature(coda.writer.store(answer, f"{name}, restored"))

    sections = (
        _section(prelude, targets, targets),
        _section(block, next_state, next_state),
        _section(coda, answer.features, {}),
    )
    # All variables change at once: they are written by the last layer, which wipes the old ones.
    for written in next_state:
        written.layer = sections[1].n_layers - 1
    used = {f for section in sections for written in section.live for f in written.inputs}
    read = [f for f in (tokens, indices) if f in used.union(answer.features)]
    persistent = [*read, *fixed.values(), *variables.values()]
    return LoweredProgram(source, persistent, embedded, *sections, answer)


def _is_rough(answer: FeatureFunction, next_state: Mapping[Feature, Feature]) -> bool:
    """Whether an answer is read from thresholds on a number; variables, as a loop leaves them.

    Their units take large numbers from one another, so that in another basis they are exact to
    some 1e-5 and not to 1e-7: enough for whatever reads flags, but not for logits.
    """
    found = [next_state.get(f, f).writes for f in answer.features]
    exact = ("constant", "rules", "levels", "found")
    return any(writes is not None and writes.how not in exact for writes in found)


def _prepare(
    source: ValidatedProgram,
    prelude: SectionLowering,
    variables: Mapping[str, Feature],
    embedded: tuple[Feature, Feature],
) -> tuple[dict[Feature, FeatureFunction], dict[Feature, Feature]]:
    """The variables' first values: by the embedding where it can, else written by the prelude."""
    by_embedding: dict[Feature, FeatureFunction] = {}
    by_prelude: dict[Feature, Feature] = {}
    for name, expr in source.prepare.items():
        function = prelude.function(expr)
        if all(f in embedded for f in function.features) and len(function.features) <= 1:
            by_embedding[variables[name]] = function
        else:
            values = variables[name].values
            written = prelude.writer.store(function, name, role="variable", values=values)
            by_prelude[written] = variables[name]
    return by_embedding, by_prelude


def _constant_nodes(source: ValidatedProgram) -> list[Seq]:
    """What step and finish need of heads that read no variable: the largest such expressions."""
    roots = [*source.step.values(), source.finish]
    with_heads: set[Expr] = set()
    for node in postorder(roots):
        if isinstance(node, (Aggregate, SelWidth)) or any(c in with_heads for c in node.children):
            with_heads.add(node)
    found: dict[Seq, None] = {}
    seen: set[Expr] = set()
    waiting: list[Expr] = list(roots)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Seq) and node in with_heads and not node.variables:
            found[node] = None
        elif node not in seen:
            seen.add(node)
            waiting.extend(node.children)
    return list(found)


def _section(
    section: SectionLowering, roots: Iterable[Feature], targets: Mapping[Feature, Feature]
) -> LoweredSection:
    """What of a section the roots need; heads carry nothing else."""
    needed = live(roots)
    written = [f for f in section.writer.written if f in needed]
    for head in {f.head for f in written if f.head is not None}:
        head.carried = {f: codes for f, codes in head.carried.items() if f in needed}
    n_layers = 1 + max((f.layer for f in written), default=-1)
    return LoweredSection(section.name, n_layers, written, targets)


def live(roots: Iterable[Feature]) -> set[Feature]:
    """The features that some features are made from, and they themselves."""
    found: set[Feature] = set()
    waiting = list(roots)
    while waiting:
        feature = waiting.pop()
        if feature not in found:
            found.add(feature)
            waiting.extend(feature.inputs)
    return found
