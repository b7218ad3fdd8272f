"""Stage 3, lower: the program as three sections of layers over persistent features.

The prelude computes once what reads no variable; the block is ``step``, the coda ``finish``. An
expression gets its own feature if a head must read it, if it is a variable, or if its table would
be too large.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from loopinterp.compiler.features import Feature, FeatureFunction, constant, fuse, of_feature
from loopinterp.compiler.heads import AggregateHeads, AttentionRelation
from loopinterp.compiler.lookups import FeatureWriter, has_few_rules
from loopinterp.compiler.validation import ValidatedProgram, applied
from loopinterp.core.errors import InputError
from loopinterp.programs import expressions as nodes
from loopinterp.programs.expressions import Expr, Indices, Seq, Tokens, Var, code, postorder


@dataclass(eq=False)
class LoweredSection:
    """A section and the features it needs, in the order of their creation."""

    name: str
    n_layers: int
    live: list[Feature]
    targets: Mapping[Feature, Feature]  # those written in place of persistent ones -> these


@dataclass(frozen=True, eq=False)
class LoweredProgram:
    source: ValidatedProgram
    persistent: list[Feature]  # with coordinates of their own
    embedded: Mapping[Feature, FeatureFunction]  # variables whose first value the embedding gives
    prelude: LoweredSection
    block: LoweredSection
    coda: LoweredSection
    answer: FeatureFunction  # the unembedding reads it

    @property
    def sections(self) -> tuple[LoweredSection, LoweredSection, LoweredSection]:
        return self.prelude, self.block, self.coda


def lower_program(source: ValidatedProgram) -> LoweredProgram:
    """Lower a program.

    Raises:
        InputError: If one layer cannot look up an expression; the message names it.
    """
    tokens = Feature("tokens", tuple(range(len(source.program.inputs))), "tokens")
    indices = Feature("indices", tuple(range(source.max_length)), "indices")
    inputs = {Tokens(): of_feature(tokens), Indices(): of_feature(indices)}
    variables = {
        name: Feature(name, tuple(source.domains[Var(name)].tolist()), "variable")
        for name in source.prepare
    }

    prelude = SectionLowering("prelude", source, inputs, indices)
    embedded, targets = _prepare(source, prelude, variables, (tokens, indices))
    fixed: dict[Expr, Feature] = {}
    for node in _constant_nodes(source):
        function, name = prelude.function(node), code(node, short=True)
        fixed[node] = Feature(name, function.values, "fixed")
        targets[prelude.writer.store(function, name, role="fixed")] = fixed[node]

    stored = {**fixed, **{Var(name): feature for name, feature in variables.items()}}
    known = {**inputs, **{node: of_feature(feature) for node, feature in stored.items()}}
    block = SectionLowering("block", source, known, indices)
    next_state: dict[Feature, Feature] = {}
    becomes = {name: block.function(x) for name, x in source.step.items()}
    for name, function in becomes.items():
        what, variable = f"step, {name} = {source.step[name]!r}", variables[name]
        written = block.writer.store(function, what, role="variable", values=variable.values)
        next_state[written] = variable

    coda = SectionLowering("coda", source, known, indices)
    answer = coda.function(source.finish)
    name = f"answer: {code(source.finish, short=True)}"
    if not answer.for_attention:
        answer = of_feature(coda.writer.store(answer, name))
    # An answer that is read from thresholds on a number (of a variable, as a loop leaves it): their
    # units subtract large numbers, so that in another basis they are exact to some 1e-5 and not to
    # 1e-7. That is enough for reads of flags, but not for logits.
    written_as = {variable: written for written, variable in next_state.items()}
    writes = [written_as.get(f, f).writes for f in answer.features]
    if any(x and x.how not in ("constant", "rules", "levels", "found") for x in writes):
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


def _prepare(
    source: ValidatedProgram,
    prelude: SectionLowering,
    variables: Mapping[str, Feature],
    embedded: tuple[Feature, Feature],
) -> tuple[dict[Feature, FeatureFunction], dict[Feature, Feature]]:
    """The variables' first values: from the embedding if possible, else written by the prelude."""
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
    """The largest expressions of step and finish that have heads and read no variable."""
    roots = [*source.step.values(), source.finish]
    with_heads: set[Expr] = set()
    for node in postorder(roots):
        is_head = isinstance(node, (nodes.Aggregate, nodes.SelWidth))
        if is_head or not with_heads.isdisjoint(node.children):
            with_heads.add(node)
    constants: dict[Seq, None] = {}
    seen: set[Expr] = set()
    waiting: list[Expr] = list(roots)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Seq) and node in with_heads and not node.variables:
            constants[node] = None
        elif node not in seen:
            seen.add(node)
            waiting.extend(node.children)
    return list(constants)


def _section(
    section: SectionLowering, roots: Iterable[Feature], targets: Mapping[Feature, Feature]
) -> LoweredSection:
    needed = set(roots)
    while more := {read for feature in needed for read in feature.inputs} - needed:
        needed |= more
    written = [f for f in section.writer.written if f in needed]
    for head in {f.head for f in written if f.head is not None}:
        head.carried = {f: codes for f, codes in head.carried.items() if f in needed}
    n_layers = 1 + max((f.layer for f in written), default=-1)
    return LoweredSection(section.name, n_layers, written, targets)


class SectionLowering:
    """The planned layers of one section; ``known`` expressions are in the stream at the start."""

    def __init__(
        self,
        name: str,
        source: ValidatedProgram,
        known: dict[Expr, FeatureFunction],
        indices: Feature,
    ) -> None:
        self.name, self.source = name, source
        self.functions: dict[Expr, FeatureFunction] = dict(known)
        self.writer = FeatureWriter(source)
        self._heads = AggregateHeads(self.writer, indices)

    def function(self, expr: Seq) -> FeatureFunction:
        """An expression as a function of features; missing features are added."""
        for node in postorder([expr], self.functions):
            match node:
                case nodes.Full():
                    function = constant(node.value)
                case nodes.TokMap() | nodes.Elementwise():
                    function = self._operation(node)
                case nodes.SelWidth():
                    function = self._heads.width(node, self._relation(node.selector))
                case nodes.Aggregate():
                    relation = self._relation(node.selector)
                    function = self._heads.aggregate(node, relation, self._readable(node.value))
                case _:
                    assert not isinstance(node, Seq), f"{node!r} is not known in the {self.name}"
                    continue  # a selection is lowered where it is read
            self.functions[node] = function.within(self.source.domains[node])
        return self.functions[expr]

    def _relation(self, select: nodes.Selector) -> AttentionRelation:
        assert isinstance(select, nodes.Select)  # there is no other selector
        return AttentionRelation.from_functions(
            select, self._readable(select.k), self._readable(select.q)
        )

    def _readable(self, node: Seq) -> FeatureFunction:
        """An expression as a function that a head can read; stored if necessary."""
        if not self.functions[node].for_attention:
            self._store(node)
        return self.functions[node]

    def _operation(self, node: nodes.TokMap | nodes.Elementwise) -> FeatureFunction:
        """An operation as a function of its arguments' features, or of stored arguments."""
        op = node.op if isinstance(node, nodes.Elementwise) else None

        def fused() -> FeatureFunction | None:
            functions = [self.functions[arg] for arg in node.children]
            return fuse(partial(applied, self.source, node), functions, op)

        function = fused()
        args = dict.fromkeys(node.children)
        several = [arg for arg in args if len(self.functions[arg].features) > 1]
        if several and not has_few_rules(function):
            for arg in several:
                self._store(arg)
            function = fused()
        if function is None:
            # Flags of large features are small features.
            for arg in args:
                large = self.functions[arg]
                if large.features and len(large.values) < large.table.size:
                    self._store(arg)
            function = fused()
        if function is None:
            got = " and ".join(f"{len(self.functions[x].values)} values" for x in node.children)
            expected = "arguments with few enough values to be tabled together"
            fix = "Compile for a smaller max_length, or write it in smaller steps."
            raise InputError(self.source.where(node), expected=expected, given=got, fix=fix)
        return function

    def _store(self, node: Expr) -> None:
        function = self.functions[node]
        self.functions[node] = of_feature(self.writer.store(function, code(node, short=True)))
