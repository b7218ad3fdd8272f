r"""Superposition: the program in fewer dimensions than its features have directions.

The stream becomes h' = W h with a wide matrix W, the frame. Every read of h becomes the
least-squares read of h' over the states of its site: with rows X that span them,
:math:`X^\top (W X^\top)^+`. Below some number of dimensions features interfere, and a search
minimises the interference.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from pydantic import NonNegativeInt
from torch import Tensor

from loopinterp.compiler.assembly import LOGIT, SHARPNESS
from loopinterp.compiler.circuit import ROUNDING, Circuit, Superposition, orthonormal
from loopinterp.compiler.compiled import Compiled
from loopinterp.compiler.disguises import (
    NOISE,
    Weights,
    by_head,
    layers,
    moved,
    normal,
    rebuilt,
    weights_of,
)
from loopinterp.compiler.features import STATE, FeaturePoints, StreamFeatures
from loopinterp.core.boundary import checked
from loopinterp.core.errors import check_integer, need
from loopinterp.core.settings import Seed
from loopinterp.models.taps import recording_gradients


@checked
def superpose(
    compiled: Compiled, *, d_model: int | None = None, seed: Seed, steps: NonNegativeInt = 200
) -> Compiled:
    """Hold the program in fewer dimensions than its features have directions.

    Down to ``circuit.superposition.exact_d_model`` dimensions, the most that the states of one site
    span, every read is unchanged, up to rounding. With fewer, values interfere;
    :func:`check_disguise` and :func:`compare_with_program` measure how much.

    Args:
        d_model: Dimensions; by default the fewest in which it is exact.
        steps: Steps of the search for directions (Adam); with 0 they are random.

    Raises:
        InputError: If ``d_model`` is not below the model's, or leaves no room beside protected
            directions, or the model is noisy or superposed inexactly.

    Example:
        >>> from loopinterp.compiler import compile_program, superpose
        >>> plain = compile_program("ripple", max_length=6)
        >>> dense = superpose(plain, seed=0)
        >>> plain.model.config.d_model, dense.model.config.d_model
        (18, 14)
        >>> dense.circuit.superposition.exact
        True
    """
    stream = _Stream(compiled)
    width = stream.needed if d_model is None else d_model
    fewest = min(len(stream.protected) + 1, stream.needed)  # leaves one dimension to share
    most = compiled.model.config.d_model - 1
    fix = f"Every read is exact from {stream.needed} dimensions on."
    check_integer("d_model", width, least=fewest, most=most, fix=fix)
    return stream.superposed(width, steps, seed)


@dataclass(frozen=True, eq=False)
class _Frame:
    """The narrower stream as a function of the old one, by orthonormal rows.

    Protected directions keep their own dimensions; inexact erasure may leave a ``residue`` of this
    size in the rest.
    """

    protected: Float[Tensor, "protected d_model"]
    mixed: Float[Tensor, "mixed d_model"]
    residue: float

    @property
    def write(self) -> Float[Tensor, "new_d_model d_model"]:
        return torch.cat([self.protected, self.mixed])

    def read(self, here: FeaturePoints) -> Float[Tensor, "d_model new_d_model"]:
        """The best linear read of the old stream over the states of a site."""
        x = here.span - here.span @ self.protected.mT @ self.protected  # [row, d_model]
        seen = x @ self.mixed.mT  # [row, mixed]
        if self.residue:  # ridge regression of x on what is seen of it, towards the plain read
            gram = seen.mT @ seen + self.residue**2 * torch.eye(len(self.mixed)).double()
            mixed = torch.linalg.solve(gram, seen.mT @ x + self.residue**2 * self.mixed).mT
        else:
            mixed = (torch.linalg.pinv(seen, rtol=ROUNDING) @ x).mT
        return torch.cat([self.protected.mT, mixed], 1)

    def reads(
        self, rows: Tensor, here: FeaturePoints
    ) -> tuple[Float[Tensor, "row new_d_model"], Float[Tensor, " row"], Float[Tensor, " row"]]:
        """Rows that read the old stream as rows that read the new one.

        Also what to add to their biases, the middle of the interval of their errors
        :math:`(w' W - w) x` over all states x of the site, and half its width.
        """
        new = rows @ self.read(here)  # [row, new_d_model]
        low, high = here.extremes(new @ self.write - rows)
        return new, -(low + high) / 2, (high - low) / 2


class _Stream:
    def __init__(self, compiled: Compiled) -> None:
        self.weights = weights_of(compiled)
        self.compiled, self.circuit = compiled, compiled.circuit
        record, disguises = self.circuit.superposition, self.circuit.disguises
        noisy = any(disguise.startswith(NOISE) for disguise in disguises)
        got = f"one with the disguises {', '.join(disguises)}"
        fix = "Superpose it once, and before noise is added."
        exact = not noisy and (record is None or record.exact)
        need(exact, "compiled", "an exact circuit", got, fix)
        self.features = StreamFeatures(self.circuit)
        self.distractors = unlisted_directions(self.weights, self.circuit)
        spans = [here.span for here in self.features.distinct_sites()]
        others = self.distractors
        # [rank, d_model] for each site: what stands there beside the distractors.
        self.bases = [orthonormal(span - span @ others.mT @ others) for span in spans]
        self.needed = len(self.distractors) + max(map(len, self.bases))

    @cached_property
    def protected(self) -> Float[Tensor, "protected d_model"]:
        """Directions with dimensions of their own in an inexact superposition.

        Errors grow in numbers and in what heads write, and softmax enlarges errors of uneven
        attention.
        """
        how = ("mean", "max", "min", "count")
        uneven = {group.id for group in self.circuit.neurons if group.how in how}
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

    def superposed(self, width: int, steps: int, seed: int) -> Compiled:
        frame = self._frame(width, steps, torch.Generator().manual_seed(seed))
        old, write = self.compiled.model.config, frame.write
        new = moved(self.weights, write, write.mT)
        sites = {"unembedding": ("coda", 2 * old.n_coda)}
        for section, layer, prefix in layers(old):
            sites[f"{prefix}attn.qkv"] = section, 2 * layer
            sites[f"{prefix}mlp.fc_in"] = section, 2 * layer + 1
        for name, site in sites.items():
            rows, shift, _ = frame.reads(self.weights[f"{name}.weight"], self.features.at(*site))
            new[f"{name}.weight"] = rows
            new[f"{name}.bias"] = self.weights[f"{name}.bias"] + shift
        # Each loop begins with P h + (1 - P - U) e: P projects on the differences between values of
        # variables, U on the directions of distractors. State and input differ in nothing else, so
        # this is the state without what the distractors wrote, for every frame.
        variables = tuple(f.id for f in self.circuit.variables.values())
        keeps = orthonormal(torch.cat(self.features.points(variables).centred) @ write.mT)
        drops = orthonormal(torch.cat([keeps, self.distractors @ write.mT]), largest=1.0)
        new["recall.state.weight"] = keeps.mT @ keeps  # [d_model, d_model], as the next
        new["recall.input.weight"] = torch.eye(width).double() - drops.mT @ drops
        record = Superposition(d_model=width, exact_d_model=self.needed)
        directions = {}
        for feature in self.circuit.features:
            read = frame.read(self.features.at(*self.features.last_site(feature)))
            directions[feature.id] = self.circuit.directions[feature.id].moved(write, read)
        circuit = dataclasses.replace(self.circuit, directions=directions, superposition=record)
        how = "exactly" if record.exact else f"{self.needed} would be exact"
        disguise = f"superposed in {width} of {old.d_model} dimensions, {how} (seed {seed})"
        return rebuilt(self.compiled, new, circuit, disguise, d_model=width, d_head=old.head_width)

    def _frame(self, width: int, steps: int, g: torch.Generator) -> _Frame:
        """Directions in ``width`` dimensions with the least collinearity or interference found."""
        exact = width >= self.needed
        # Inexact erasure leaves residues of some size, against which reads are made robust.
        protected, residue = (self.distractors, 0.0) if exact else (self.protected, 0.2)
        # An orthonormal basis of the complement of what is protected.
        rest = torch.linalg.qr(protected.mT, mode="complete")[0].mT[len(protected) :]

        def frame(free: Tensor) -> _Frame:
            return _Frame(protected, torch.linalg.qr(free.mT)[0].mT @ rest, residue)

        def collinearity(frame: _Frame) -> Tensor:
            # The negative log det of the Gram matrices of the sites: least where directions are
            # orthogonal, without bound where two coincide. A ridge keeps the matrices invertible.
            seen = [basis @ frame.mixed.mT for basis in self.bases]
            grams = [x @ x.mT + 1e-9 * torch.eye(len(x), dtype=x.dtype) for x in seen]
            return -torch.stack([torch.logdet(gram) for gram in grams]).sum()

        def interference(frame: _Frame) -> Tensor:
            # Nearly the largest error of the program's reads, as a share of what each can bear.
            errors = [frame.reads(rows, here)[2] / most for rows, here, most in self._program_reads]
            return torch.cat(errors).pow(16).mean().pow(1 / 16).log()

        free = normal(width - len(protected), len(rest), g=g).requires_grad_()
        loss = collinearity if exact else interference
        search = torch.optim.Adam([free], lr=0.05)
        with recording_gradients():
            for _ in range(steps):
                search.zero_grad()
                loss(frame(free)).backward()
                search.step()
        return frame(free.detach())

    @cached_property
    def _program_reads(self) -> list[tuple[Tensor, FeaturePoints, Tensor]]:
        """Rows that read the stream, the points of their site, and the tolerated interference."""
        circuit, features, reads = self.circuit, self.features, []

        def add(rows: Tensor, here: FeaturePoints, margin: float | Tensor) -> None:
            if len(rows):
                reads.append((rows, here, torch.as_tensor(margin).expand(len(rows))))

        for section, layer, prefix in layers(self.compiled.model.config):
            here = features.at(section, 2 * layer)
            heads = [h for h in circuit.heads if (h.section, h.layer) == (section, layer)]
            for node in heads:
                # The score of each key as queries read it and of each query as keys do, and the
                # output of the values: the same in any basis inside the head.
                w_q, w_k, w_v = self._by_head(f"{prefix}attn.qkv.weight")[:, node.head]
                bias = self._by_head(f"{prefix}attn.qkv.bias")[:, node.head]  # [3, d_head]
                # [row, d_head], of the directions of the site and, last, their mean.
                queries, keys = here.span @ w_q.mT, here.span @ w_k.mT
                queries[-1] += bias[0]
                # The mean, which all keys share, does not move attention.
                scores = torch.cat([keys[:-1] @ w_q, queries @ w_k]) / len(w_q) ** 0.5
                add(scores, here, SHARPNESS / 4)
                out = self._by_head(f"{prefix}attn.out.weight")[:, node.head]
                add(out @ w_v, here, 0.25)  # shares of values
            groups = [g for g in circuit.neurons if (g.section, g.layer) == (section, layer)]
            rows = self.weights[f"{prefix}mlp.fc_in.weight"][[n for g in groups for n in g.neurons]]
            # Units are flat so far around what they read; what is not erased is in the way of what
            # is written there next.
            erases = torch.tensor([g.how == "wipe" for g in groups for _ in g.neurons])
            margin = torch.where(erases, 0.25, 0.5)
            add(rows, features.at(section, 2 * layer + 1), margin)
        end = features.at("coda", 2 * self.compiled.model.config.n_coda)
        add(self.weights["unembedding.weight"], end, LOGIT / 2)
        rows = torch.cat([circuit.directions_of(v).read.double() for v in circuit.variables])
        add(rows, features.at(*STATE), 0.5)
        return reads

    def _by_head(self, name: str) -> Tensor:
        return by_head(self.weights, name, self.compiled.model.config.n_heads)


def unlisted_directions(weights: Weights, circuit: Circuit) -> Float[Tensor, "row d_model"]:
    """An orthonormal basis of what the weights write outside the circuit's features."""
    written = [
        w if "embedding" in name else w.mT if w.ndim == 2 else w[None]
        for name, w in weights.items()
        if name.split(".")[0] in ("embedding", "position_embedding")
        or name.split(".")[-2] in ("out", "fc_out")
    ]
    rows = torch.cat(written)
    # [rank, d_model], of all features; what rows hold beside it belongs to none.
    listed = orthonormal(torch.cat([d.write.double() for d in circuit.directions.values()]))
    return orthonormal(rows - rows @ listed.mT @ listed, largest=float(rows.norm(dim=-1).max()))
