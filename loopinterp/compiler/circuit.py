"""The circuit of a compiled model: its features, and the heads and neurons that use them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from loopinterp.core.errors import CheckpointError, need, unknown_name
from loopinterp.core.storage import read_json_object, read_tensors, write_json, write_tensors
from loopinterp.core.text import ShortRepr

CIRCUIT_FILE = "circuit.json"
DIRECTIONS_FILE = "circuit.safetensors"
ROUNDING = 1e-5
"""Values below this share of the largest are float32 rounding."""


@dataclass(frozen=True)
class FeatureNode:
    id: str  # its name in edges
    name: str  # the variable, or the expression as code
    role: str  # "tokens", "indices", "fixed", "variable" or "scratch"
    section: str  # where it is written; "embedding" if it is there from the start
    layer: int  # of that section; -1 if it is there from the start
    last_use: int  # last layer of the section that reads it; -1 for what is held throughout
    values: tuple[int, ...]  # a direction for each, unless it stands along a single one


@dataclass(frozen=True)
class HeadNode:
    id: str  # its name in edges
    section: Literal["prelude", "block", "coda"]
    layer: int
    head: int
    selector: str  # its name, as in a trace
    attends_to: str  # the selection, as code: keys, queries, predicate


@dataclass(frozen=True)
class NeuronGroup:
    """The neurons of one MLP that write one feature or erase some."""

    id: str  # its name in edges
    section: Literal["prelude", "block", "coda"]
    layer: int
    neurons: tuple[int, ...]
    writes: str  # the feature; "" for those that wipe
    # "rules", "levels", "sum", "mean", "max", "min", "count", "found" or "wipe"
    how: str


@dataclass(frozen=True)
class Directions:
    """The directions of the values of a feature.

    A value adds its row of ``write`` to the stream; ``read @ state`` is 1 for it and 0 for the
    others.
    """

    write: Float[Tensor, "value d_model"]
    read: Float[Tensor, "value d_model"]

    def moved(
        self,
        write: Float[Tensor, "new_d_model d_model"],
        read: Float[Tensor, "d_model new_d_model"],
    ) -> Directions:
        # Both [value, new_d_model], computed in float64.
        return Directions(
            write=(self.write.double() @ write.double().mT).to(self.write),
            read=(self.read.double() @ read.double()).to(self.read),
        )


@dataclass(frozen=True)
class Superposition:
    """A model's dimensions, and the fewest in which every read is exact."""

    d_model: int
    exact_d_model: int

    @property
    def exact(self) -> bool:
        """Whether every read is unchanged, up to rounding."""
        return self.d_model >= self.exact_d_model


@dataclass(frozen=True, eq=False, repr=False)
class Circuit(ShortRepr):
    """Nodes, edges and directions of a compiled model.

    A node of the block stands for itself at every loop. Edges lead from features to the heads and
    neurons that read them, and from these to the features they write.
    """

    program: str
    inputs: tuple[str, ...]  # the meaning of each input token
    max_length: int  # positions of the longest sequence
    n_layers: Mapping[str, int]  # of each section
    features: tuple[FeatureNode, ...]
    heads: tuple[HeadNode, ...]
    neurons: tuple[NeuronGroup, ...]
    edges: tuple[tuple[str, str], ...]  # (from, to), by id
    directions: Mapping[str, Directions]  # by id of the feature
    disguises: tuple[str, ...] = ()  # in the order in which they were put on
    superposition: Superposition | None = None  # if it has fewer dimensions than directions

    def __repr__(self) -> str:
        sizes = f"{len(self.features)} features, {len(self.heads)} heads"
        name = ", ".join((self.program, *self.disguises))
        return f"<Circuit {name}: {sizes}, {len(self.neurons)} neuron groups>"

    @property
    def variables(self) -> dict[str, FeatureNode]:
        """The program's variables by name."""
        return {f.name: f for f in self.features if f.role == "variable"}

    def directions_of(self, variable: str) -> Directions:
        """The directions of a variable."""
        if variable not in self.variables:
            raise unknown_name(f"variable of {self.program}", variable, self.variables)
        return self.directions[self.variables[variable].id]

    def decode(
        self, variable: str, state: Float[Tensor, "*shape d_model"]
    ) -> Int[Tensor, "*shape"]:
        """The value of a variable in a state: the one with the largest read."""
        read = self.directions_of(variable).read
        fits = state.is_floating_point() and state.shape[-1:] == read.shape[1:]
        expected = f"floating-point numbers with a last axis of d_model = {read.shape[1]}"
        got = f"{state.dtype} of shape {list(state.shape)}"
        fix = "Pass states of the model that this circuit belongs to."
        need(fits, "state", expected, got, fix)
        values = torch.tensor(self.variables[variable].values, device=state.device)
        return values[(state @ read.to(state).mT).argmax(-1)]  # reads are [*shape, value]

    def subspace(self, variable: str) -> Float[Tensor, "rank d_model"]:
        """An orthonormal basis of the directions that write a variable."""
        return orthonormal(self.directions_of(variable).write)

    def moved(
        self,
        write: Float[Tensor, "new_d_model d_model"],
        read: Float[Tensor, "d_model new_d_model"],
    ) -> Circuit:
        """The circuit in the stream h' = ``write`` h, where h = ``read`` h'."""
        directions = {name: old.moved(write, read) for name, old in self.directions.items()}
        return dataclasses.replace(self, directions=directions)

    def renumbered(
        self,
        heads: Mapping[tuple[str, int], Sequence[int]],
        neurons: Mapping[tuple[str, int], Sequence[int]],
    ) -> Circuit:
        """The circuit with new numbers for the heads and neurons of each (section, layer)."""
        names: dict[str, str] = {}
        nodes = []
        for node in self.heads:
            number = heads[node.section, node.layer][node.head]
            names[node.id] = f"{node.section}.{node.layer}.head.{number}"
            nodes.append(dataclasses.replace(node, id=names[node.id], head=number))
        groups = [
            dataclasses.replace(g, neurons=tuple(neurons[g.section, g.layer][n] for n in g.neurons))
            for g in self.neurons
        ]
        edges = tuple((names.get(s, s), names.get(t, t)) for s, t in self.edges)
        return dataclasses.replace(self, heads=tuple(nodes), neurons=tuple(groups), edges=edges)

    def save(self, folder: str | Path) -> None:
        """Write ``circuit.json`` and ``circuit.safetensors`` to a folder."""
        fields = dataclasses.asdict(dataclasses.replace(self, directions={}))
        del fields["directions"]
        tensors = {}
        for name, directions in self.directions.items():
            tensors[f"{name}.write"] = directions.write.contiguous()
            tensors[f"{name}.read"] = directions.read.contiguous()
        write_tensors(Path(folder) / DIRECTIONS_FILE, tensors)
        write_json(Path(folder) / CIRCUIT_FILE, {"format": 1, **fields})

    @classmethod
    def load(cls, folder: str | Path) -> Circuit:
        """Read a circuit that :meth:`save` wrote.

        Raises:
            CheckpointError: If a file is missing, damaged, or of another format.
        """
        path = Path(folder) / CIRCUIT_FILE
        saved = read_json_object(path)
        tensors = read_tensors(Path(folder) / DIRECTIONS_FILE)

        def tupled(node: Mapping[str, Any]) -> dict[str, Any]:
            return {k: tuple(v) if isinstance(v, list) else v for k, v in node.items()}

        try:
            if saved.pop("format") != 1:
                raise ValueError("another format")
            fields = tupled(saved)
            kinds = {"features": FeatureNode, "heads": HeadNode, "neurons": NeuronGroup}
            for name, kind in kinds.items():
                fields[name] = tuple(kind(**tupled(node)) for node in saved[name])
            fields["edges"] = tuple((source, target) for source, target in saved["edges"])
            if saved["superposition"] is not None:
                fields["superposition"] = Superposition(**saved["superposition"])
            ids = [feature.id for feature in fields["features"]]
            directions = {i: Directions(tensors[f"{i}.write"], tensors[f"{i}.read"]) for i in ids}
            return cls(**fields, directions=directions)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            expected, fix = "a circuit of format 1 and its directions", "Compile and save it again."
            what, got = f"circuit {path}", f"{type(error).__name__}: {error}"
            raise CheckpointError(what, expected=expected, given=got, fix=fix) from error


def orthonormal(
    rows: Float[Tensor, "row d_model"], *, largest: float | None = None, least: float = ROUNDING
) -> Float[Tensor, "rank d_model"]:
    """An orthonormal basis of the span of rows, found in float64.

    Singular values of at most ``least`` times the largest are left out.
    """
    # sizes [k], largest first, and basis [k, d_model]; k is the lesser of row and d_model.
    _, sizes, basis = torch.linalg.svd(rows.double(), full_matrices=False)
    if largest is None:
        largest = float(sizes.max()) if len(sizes) else 0.0
    return basis[sizes > max(least * largest, 1e-300)].to(rows)
