r"""Superposition: the program in fewer dimensions than its features have directions.

h' = W h with a wide matrix W, the frame, and every read of h becomes the least-squares read of h'
for what may stand in the stream at that site: with rows X that span it, :math:`X^\top
(W X^\top)^+`. Down to some number of dimensions those reads are exact; below it features interfere,
and directions are sought along which they do so least.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError, check_integer
from loopinterp.models.recorded_gradients import recording_gradients
from loopinterp.rasp.compiler.agreement import compare_with_program
from loopinterp.rasp.compiler.assemble import LOGIT, SHARPNESS
from loopinterp.rasp.compiler.circuit import ROUNDING, Superposition, orthonormal
from loopinterp.rasp.compiler.compiled import Compiled
from loopinterp.rasp.disguises.compiled_weights import (
    by_head,
    generator,
    layers,
    moved,
    normal,
    rebuilt,
    weights_of,
)
from loopinterp.rasp.disguises.noise import NOISE
from loopinterp.rasp.disguises.stream_features import (
    STATE,
    FeaturePoints,
    StreamFeatures,
    unlisted_directions,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

RIDGE = 1e-9
"""Keeps matrices invertible while directions are sought."""

RATE = 0.05
"""Learning rate of the search (Adam)."""

NORM = 16
"""A search lowers the mean of interferences to this power: the large ones."""

UNEVEN = frozenset(("mean", "max", "min", "count"))
"""Neurons that read how much of a head's attention is where. Softmax enlarges errors of its scores
for them, so what such a head reads keeps dimensions of its own."""

RESIDUE = 0.2
"""Size of what inexact erasure leaves in the stream, against which reads are made robust."""

SCORE_MARGIN = SHARPNESS / 4
"""Interference that an attention score can bear, from its query and from its key."""

VALUE_MARGIN = 0.25
"""Interference that the shares of values that a head writes can bear."""

UNIT_MARGIN = 0.5
"""Interference that a neuron's input can bear: units are flat so far around what they read."""


def superpose(
    compiled: Compiled, *, d_model: int | None = None, seed: int, steps: int = 200
) -> Compiled:
    r"""Hold the program in fewer dimensions than its features have directions.

    Down to ``circuit.superposition.exact_d_model`` dimensions every read is the same number as
    before, up to rounding: the shares of a feature's values sum up to 1, and what never stands in
    the stream at the same time may fall together. That number is the largest dimension of what
    stands at one site, below which no linear read can tell it apart. With fewer dimensions values
    interfere; units absorb some of it, and whether the outputs are still right is measured:
    :func:`check_disguise`, :func:`compare_with_program`.

    Args:
        compiled: The model and its circuit; it is not changed.
        d_model: Dimensions; by default the fewest in which it is exact.
        seed: Seed of the directions.
        steps: Steps of the search for directions that are told apart well; with 0 they are random.

    Raises:
        InputError: ``d_model`` is not below the model's, or not above what has to keep dimensions
            of its own; the model is noisy or superposed inexactly; or a number is none.

    Example:
        >>> from loopinterp.rasp import compile_program, superpose
        >>> plain = compile_program("ripple", max_length=6)
        >>> dense = superpose(plain, seed=0)
        >>> plain.model.config.d_model, dense.model.config.d_model
        (18, 14)
        >>> dense.circuit.superposition.exact
        True
    """
    check_integer("steps", steps, least=0)
    stream = _Stream(compiled)
    return stream.superposed(stream.checked_width(d_model), steps, seed)


def narrowest_superposition(
    compiled: Compiled,
    inputs: Int[Tensor, "batch pos"],
    *,
    n_loops: int,
    seed: int,
    steps: int = 200,
) -> Compiled:
    """The narrowest superposition found that runs its program exactly on some inputs.

    Found by halving the interval between what has to be kept apart and what is exact. All values
    and answers are right at every loop on these inputs; other inputs are not spoken for, and
    neither are fewer dimensions along other directions.

    Args:
        compiled: The model and its circuit; it is not changed.
        inputs: Tokens on which values and answers are compared with the program's.
        n_loops: Loops over which they are.
        seed: Seed of the directions.
        steps: Steps of each search for directions.

    Raises:
        InputError: as for :func:`superpose` and :func:`compare_with_program`.

    Example:
        >>> from loopinterp.rasp import compile_program, narrowest_superposition
        >>> tokens = torch.tensor([[4, 3, 1, 2, 0], [4, 1, 1, 3, 2]])
        >>> plain = compile_program("ripple", max_length=6)
        >>> dense = narrowest_superposition(plain, tokens, n_loops=5, seed=0, steps=50)
        >>> dense.model.config.d_model < dense.circuit.superposition.exact_d_model
        True
    """
    check_integer("steps", steps, least=0)
    stream = _Stream(compiled)
    wrong, right = stream.fewest - 1, stream.checked_width(None)
    best = stream.superposed(right, steps, seed)
    while right - wrong > 1:
        width = (right + wrong) // 2
        dense = stream.superposed(width, steps, seed)
        if compare_with_program(dense, inputs, n_loops=n_loops).exact:
            best, right = dense, width
        else:
            wrong = width
    return best


@dataclass(frozen=True, eq=False)
class _Frame:
    """Where every direction of the old stream stands in the narrower one.

    Old directions that are kept have dimensions of their own, and the others are mixed in the rest;
    rows are orthonormal, so that every dimension is used. ``residue`` is the size of what may stand
    along any direction there, not erased exactly.
    """

    kept: Float[Tensor, "kept d_model"]
    mixed: Float[Tensor, "mixed d_model"]
    residue: float

    @property
    def write(self) -> Float[Tensor, "new_d_model d_model"]:
        """The new stream as a function of the old one."""
        return torch.cat([self.kept, self.mixed])

    def read(self, here: FeaturePoints) -> Float[Tensor, "d_model new_d_model"]:
        """How the old stream is best read from the new one, knowing what may stand in it."""
        x = here.span - here.span @ self.kept.mT @ self.kept
        seen = x @ self.mixed.mT
        if self.residue:
            gram = seen.mT @ seen + self.residue**2 * torch.eye(len(self.mixed)).double()
            mixed = torch.linalg.solve(gram, seen.mT @ x + self.residue**2 * self.mixed).mT
        else:
            mixed = (torch.linalg.pinv(seen, rtol=ROUNDING) @ x).mT
        return torch.cat([self.kept.mT, mixed], 1)

    def reads(
        self, rows: Tensor, here: FeaturePoints
    ) -> tuple[Float[Tensor, "row new_d_model"], Float[Tensor, " row"], Float[Tensor, " row"]]:
        r"""Rows that read the old stream as rows that read the new one.

        Returns:
            The rows; what to add to their biases, the middle of the interval of their errors
            :math:`(w' W - w) x` over all x that may stand here; and half its width.
        """
        new = rows @ self.read(here)
        low, high = here.extremes(new @ self.write - rows)
        return new, -(low + high) / 2, (high - low) / 2


class _Stream:
    """What has to be known of a model to superpose it."""

    def __init__(self, compiled: Compiled) -> None:
        self.weights = weights_of(compiled)
        self.compiled, self.circuit = compiled, compiled.circuit
        record, disguises = self.circuit.superposition, self.circuit.disguises
        noisy = any(disguise.startswith(NOISE) for disguise in disguises)
        if noisy or (record is not None and not record.exact):
            raise InputError(
                "the model to superpose",
                expected="one whose circuit is exact",
                given=f"one with the disguises {', '.join(disguises)}",
                fix="Superpose it once, and before noise is added.",
            )
        self.features = StreamFeatures(self.circuit)
        self.distractors = unlisted_directions(self.weights, self.circuit)
        spans = [here.span for here in self.features.distinct_sites()]
        own = self.distractors
        self.bases = [orthonormal(span - span @ own.mT @ own) for span in spans]
        self.needed = len(self.distractors) + max(map(len, self.bases))

    @property
    def fewest(self) -> int:
        """The fewest dimensions that leave one for what shares them."""
        return min(len(self.kept) + 1, self.needed)

    @cached_property
    def kept(self) -> Float[Tensor, "kept d_model"]:
        """What has dimensions of its own in an inexact superposition.

        What heads write and what is a number is erased together with its errors, which must not
        be larger than it was; what heads of ``UNEVEN`` neurons read is enlarged by softmax.
        """
        uneven = {group.id for group in self.circuit.neurons if group.how in UNEVEN}
        counted = {source for source, target in self.circuit.edges if target in uneven}
        rows = [self.distractors]
        for node in self.circuit.heads:
            prefix = f"{node.section}.{node.layer}.attn."
            rows.append(self._by_head(f"{prefix}out.weight")[:, node.head].mT)
            if any(f in counted for f, h in self.features.writing_head.items() if h == node.id):
                rows.append(self._by_head(f"{prefix}qkv.weight")[:, node.head].flatten(0, 1))
        for feature in self.circuit.features:
            write = self.circuit.directions[feature.id].write.double()
            rows += [write] if len(write) != len(feature.values) else []
        return orthonormal(torch.cat(rows))

    def _by_head(self, name: str) -> Tensor:
        return by_head(self.weights, name, self.compiled.model.config.n_heads)

    def checked_width(self, d_model: int | None) -> int:
        """The dimensions to superpose in: fewer than there are, more than are kept apart."""
        width = self.needed if d_model is None else d_model
        most = self.compiled.model.config.d_model - 1
        fix = f"Every read is exact from {self.needed} dimensions on."
        return check_integer("d_model", width, least=self.fewest, most=most, fix=fix)

    def frame(self, width: int, steps: int, g: torch.Generator) -> _Frame:
        """Directions in so many dimensions that are told apart well at every site."""
        exact = width >= self.needed
        kept, residue = (self.distractors, 0.0) if exact else (self.kept, RESIDUE)
        # An orthonormal basis of all that is at right angles to what is kept.
        rest = torch.linalg.qr(kept.mT, mode="complete")[0].mT[len(kept) :]

        def frame(free: Tensor) -> _Frame:
            return _Frame(kept, torch.linalg.qr(free.mT)[0].mT @ rest, residue)

        free = normal(width - len(kept), len(rest), g=g).requires_grad_()
        loss = self._collinearity if exact else self._interference
        search = torch.optim.Adam([free], lr=RATE)
        with recording_gradients():
            for _ in range(steps):
                search.zero_grad()
                loss(frame(free)).backward()
                search.step()
        return frame(free.detach())

    def _collinearity(self, frame: _Frame) -> Tensor:
        r""":math:`-\sum \log\det` of the Gram matrix of what each site holds: least where it is
        seen at right angles, without bound where two things fall together."""
        seen = [basis @ frame.mixed.mT for basis in self.bases]
        grams = [x @ x.mT + RIDGE * torch.eye(len(x), dtype=x.dtype) for x in seen]
        return -torch.stack([torch.logdet(gram) for gram in grams]).sum()

    def _interference(self, frame: _Frame) -> Tensor:
        """The largest errors of the program's reads, as shares of what they can bear."""
        shares = [
            frame.reads(rows, here)[2] / bearable for rows, here, bearable in self._program_reads
        ]
        return torch.cat(shares).pow(NORM).mean().pow(1 / NORM).log()

    @cached_property
    def _program_reads(self) -> list[tuple[Tensor, FeaturePoints, Tensor]]:
        """Rows that read the stream, what may stand there, and the interference they can bear."""
        config, circuit, reads = self.compiled.model.config, self.circuit, []
        for section, layer, prefix in layers(config):
            for node in circuit.heads:
                if (node.section, node.layer) == (section, layer):
                    here = self.features.at(section, 2 * layer)
                    reads += self._reads_of_head(f"{prefix}attn.", node.head, here)
            groups = [g for g in circuit.neurons if (g.section, g.layer) == (section, layer)]
            rows = self.weights[f"{prefix}mlp.fc_in.weight"][[n for g in groups for n in g.neurons]]
            # What is not erased is in the way of what stands there next.
            erases = torch.tensor([g.how == "wipe" for g in groups for _ in g.neurons])
            margin = torch.where(erases, UNIT_MARGIN / 2, UNIT_MARGIN)
            reads.append((rows, self.features.at(section, 2 * layer + 1), margin))
        rows = self.weights["unembedding.weight"]
        here = self.features.at("coda", 2 * config.n_coda)
        reads.append((rows, here, torch.full((len(rows),), LOGIT / 2)))
        rows = torch.cat([circuit.of(name).read.double() for name in circuit.variables])
        reads.append((rows, self.features.at(*STATE), torch.full((len(rows),), UNIT_MARGIN)))
        return [read for read in reads if len(read[0])]

    def _reads_of_head(
        self, prefix: str, head: int, here: FeaturePoints
    ) -> list[tuple[Tensor, FeaturePoints, Tensor]]:
        """What a head reads, in any basis inside it: the score of each key as queries read it, of
        each query as keys do, and what its values write."""
        w_q, w_k, w_v = self._by_head(f"{prefix}qkv.weight")[:, head]
        bias = self.weights[f"{prefix}qkv.bias"].view(3, -1, len(w_q))[:2, head]
        queries, keys = here.span @ w_q.mT, here.span @ w_k.mT
        queries[-1] += bias[0]
        # What all keys share, their mean, does not move attention.
        scores = torch.cat([keys[:-1] @ w_q, queries @ w_k]) / len(w_q) ** 0.5
        values = self._by_head(f"{prefix}out.weight")[:, head] @ w_v
        return [
            (scores, here, torch.full((len(scores),), SCORE_MARGIN)),
            (values, here, torch.full((len(values),), VALUE_MARGIN)),
        ]

    def superposed(self, width: int, steps: int, seed: int) -> Compiled:
        """The model in so many dimensions."""
        old, frame = self.compiled.model.config, self.frame(width, steps, generator(seed))
        new = moved(self.weights, frame.write, frame.write.mT)
        sites = {"unembedding": ("coda", 2 * old.n_coda)}
        for section, layer, prefix in layers(old):
            sites[f"{prefix}attn.qkv"] = section, 2 * layer
            sites[f"{prefix}mlp.fc_in"] = section, 2 * layer + 1
        for name, site in sites.items():
            rows, shift, _ = frame.reads(self.weights[f"{name}.weight"], self.features.at(*site))
            new[f"{name}.weight"] = rows
            new[f"{name}.bias"] = self.weights[f"{name}.bias"] + shift
        new["recall.state.weight"], new["recall.input.weight"] = self._recall(frame)
        record = Superposition(d_model=width, exact_d_model=self.needed)
        directions = {}
        for feature in self.circuit.features:
            read = frame.read(self.features.at(*self.features.last_site(feature)))
            directions[feature.id] = self.circuit.directions[feature.id].moved(frame.write, read)
        circuit = dataclasses.replace(self.circuit, directions=directions, superposition=record)
        how = "exactly" if record.exact else f"{self.needed} would be exact"
        disguise = f"superposed in {width} of {old.d_model} dimensions, {how} (seed {seed})"
        return rebuilt(self.compiled, new, circuit, disguise, d_model=width, d_head=old.head_width)

    def _recall(self, frame: _Frame) -> tuple[Tensor, Tensor]:
        r"""What each loop starts from: :math:`P h + (1 - P - U) e`.

        P projects on the differences between values of variables, U on the directions of
        distractors. State and input differ in nothing else, so this is the state without what the
        distractors wrote, for every frame.
        """
        variables = tuple(f.id for f in self.circuit.variables.values())
        apart = torch.cat(self.features.points(variables).apart)
        keeps = orthonormal(apart @ frame.write.mT)
        drops = orthonormal(torch.cat([keeps, self.distractors @ frame.write.mT]), largest=1.0)
        return keeps.mT @ keeps, torch.eye(len(frame.write)).double() - drops.mT @ drops
