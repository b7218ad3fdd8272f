"""What every compiled model must hold."""

from __future__ import annotations

import torch
from torch import Tensor

from loopinterp.compiler import Agreement, Circuit, Compiled, compare_with_program
from loopinterp.programs import UNKNOWN

TOLERANCE = 1e-3


def agrees(compiled: Compiled, tokens: Tensor, n_loops: int) -> None:
    """Every variable, answer and selector is the program's, at every loop."""
    agreement = compare_with_program(compiled, tokens, n_loops=n_loops)
    assert exact(agreement), agreement


def exact(agreement: Agreement) -> bool:
    errors = [agreement.state_error, *agreement.attention_error.values()]
    return agreement.exact and max(errors) < TOLERANCE


@torch.no_grad()
def loops_until_a_state_returns(compiled: Compiled, tokens: Tensor, most: int) -> int:
    """Loops until a state equals an earlier one to the last bit, or ``most``.

    The same loops then follow again: what holds up to there holds after any number of loops.
    """
    states: list[Tensor] = []
    for loop, h in compiled.model.bind(tokens).run(most):
        if any(torch.equal(h, before) for before in states):
            return loop
        states.append(h)
    return most


def holds_nothing_else(compiled: Compiled, tokens: Tensor, n_loops: int) -> None:
    """The state is the variables and the injected input, and undecided answers are no answers."""
    with torch.no_grad():
        states = compiled.model(tokens, n_loops=n_loops, return_type="states")
        logits = torch.stack([compiled.model.readout(h) for h in states])
    rest = states.clone()
    for name in compiled.circuit.variables:
        basis = compiled.circuit.subspace(name)
        rest -= rest @ basis.T @ basis
    assert (rest - rest[0]).abs().max() < TOLERANCE
    outputs = compiled.program.trace(tokens, n_loops).outputs
    assert (logits[outputs == UNKNOWN].abs() < 0.01).all()


def all_of_it_is_described(compiled: Compiled) -> None:
    """Nodes are disjoint and cover all that is not 0; variables have orthonormal directions."""
    circuit, weights = compiled.circuit, compiled.model.state_dict()
    known = {
        node.id for nodes in (circuit.features, circuit.heads, circuit.neurons) for node in nodes
    }
    assert len(known) == len(circuit.features) + len(circuit.heads) + len(circuit.neurons)
    assert {end for edge in circuit.edges for end in edge} <= known
    stored = [f for f in circuit.features if f.role != "scratch"]
    write = torch.cat([circuit.directions[f.id].write for f in stored])
    assert torch.equal(write @ write.T, torch.eye(len(write)))
    for f in circuit.features:
        both = circuit.directions[f.id]
        assert torch.equal(both.read @ both.write.T, torch.eye(len(both.write)))
        assert len(both.write) in (1, len(f.values))
    for section, n_layers in circuit.n_layers.items():
        for layer in range(n_layers):
            part = {
                name.removeprefix(f"{section}.{layer}."): value
                for name, value in weights.items()
                if name.startswith(f"{section}.{layer}.")
            }
            _neurons_are_described(compiled, section, layer, part)
            _heads_are_described(compiled, section, layer, part)


def _neurons_are_described(
    compiled: Compiled, section: str, layer: int, part: dict[str, Tensor]
) -> None:
    circuit = compiled.circuit
    groups = [g for g in circuit.neurons if (g.section, g.layer) == (section, layer)]
    listed = [neuron for group in groups for neuron in group.neurons]
    assert len(set(listed)) == len(listed)
    w_in, w_out = part["mlp.fc_in.weight"], part["mlp.fc_out.weight"]
    used = w_in.abs().sum(1) + part["mlp.fc_in.bias"].abs() + w_out.abs().sum(0)
    assert set(used.nonzero().flatten().tolist()) == set(listed)
    for group in groups:
        neurons = list(group.neurons)
        if group.how == "wipe":
            assert group.writes == "" and not any(group.id in edge for edge in circuit.edges)
            continue
        _edges_are_weights(circuit, group.id, w_in[neurons], w_out[:, neurons])


def _heads_are_described(
    compiled: Compiled, section: str, layer: int, part: dict[str, Tensor]
) -> None:
    circuit, config = compiled.circuit, compiled.model.config
    heads = [h for h in circuit.heads if (h.section, h.layer) == (section, layer)]
    out = part["attn.out.weight"].unflatten(1, (config.n_heads, config.head_width))
    qkv = part["attn.qkv.weight"].unflatten(0, (3, config.n_heads, config.head_width))
    writing = out.abs().sum((0, 2)).nonzero().flatten().tolist()
    assert writing == sorted(head.head for head in heads)
    assert not part["attn.out.bias"].any()
    for head in heads:
        _edges_are_weights(circuit, head.id, qkv[:, head.head].flatten(0, 1), out[:, head.head])


def _edges_are_weights(circuit: Circuit, node: str, reads: Tensor, writes: Tensor) -> None:
    """A node reads each feature that leads to it, and writes where it leads to; nothing else."""
    before = [source for source, target in circuit.edges if target == node]
    after = [target for source, target in circuit.edges if source == node]
    assert after
    read = reads.abs().sum(0)
    for feature in before:
        assert (circuit.directions[feature].write.abs() @ read).any(), (feature, node)
    assert not _elsewhere(circuit, before, read).any()
    assert not _elsewhere(circuit, after, writes.abs().sum(1)).any()


def _elsewhere(circuit: Circuit, features: list[str], amounts: Tensor) -> Tensor:
    """What is left of amounts along coordinates, where none of the features stands."""
    for feature in features:
        amounts = amounts * (circuit.directions[feature].write.abs().sum(0) == 0)
    return amounts


def same(one: Circuit, other: Circuit) -> bool:
    """Whether two circuits are equal, to the last bit of their directions."""
    fields = ("program", "inputs", "max_length", "features", "heads", "neurons", "edges")
    named = all(getattr(one, name) == getattr(other, name) for name in (*fields, "disguises"))
    return (
        named
        and dict(one.n_layers) == dict(other.n_layers)
        and one.directions.keys() == other.directions.keys()
        and all(
            torch.equal(old.write, other.directions[name].write)
            and torch.equal(old.read, other.directions[name].read)
            for name, old in one.directions.items()
        )
    )


def unrolled(circuit: Circuit, n_loops: int) -> list[tuple[str, str]]:
    """The edges of a run: ``3:head`` is a node inside loop 3, ``3:carry`` the variable after 3."""
    block = {node.id for node in (*circuit.heads, *circuit.neurons) if node.section == "block"}
    block |= {f.id for f in circuit.features if f.section == "block" and f.role == "scratch"}
    state = {f.id for f in circuit.variables.values()}

    def at(name: str, loop: int) -> str:
        return f"{loop}:{name}" if name in block | state else name

    edges: list[tuple[str, str]] = []
    for source, target in circuit.edges:
        if {source, target} & block:
            loops = range(n_loops)
            edges += [(at(source, t), at(target, t + (target in state))) for t in loops]
        else:  # the prelude writes variables before the first loop, the coda reads the last
            edges.append((at(source, n_loops), at(target, 0)))
    return edges
