"""What an ablation study is asked for: which parts, how, at which loops, at which positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.circuits.activation_patching_inputs import EACH, chosen_loops, patched_component
from loopinterp.errors import InputError, check_choice, check_integer, unknown_name

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor

    from loopinterp.models import HookedRun
    from loopinterp.models.sites import Index

KINDS = ("zero", "mean", "resample")
WHEN = ("all", "one", "from", "upto")
TOGETHER = "all of them"

_NEURONS = "mlp.hook_post"

Site = tuple[str, int]
"""A component, by its full name, and its layer in the block."""


@dataclass(frozen=True)
class Part:
    """What is ablated at once.

    Attributes:
        name: What it is called.
        where: At each site, the indices after the position that belong to it.
    """

    name: str
    where: Mapping[Site, list[tuple[Any, ...]]]


def check_kinds(kinds: Sequence[str], n_examples: int) -> None:
    """Raise unless there are kinds of ablation, all known, and examples enough."""
    if not kinds:
        raise unknown_name("kinds", "", KINDS)
    for kind in kinds:
        check_choice("kinds", kind, KINDS)
    if n_examples < 2 and kinds != ("zero",):
        raise InputError(
            "data",
            expected="two examples or more, as means and other examples are taken among them",
            given="one example",
            fix="Pass a larger batch, or kinds=('zero',).",
        )


def chosen_parts(
    model: HookedRun,
    components: Sequence[str],
    neurons: Mapping[str, Sequence[int]] | None,
    *,
    together: bool,
) -> list[Part]:
    """Each head of each layer, or each layer, of the components; groups of neurons; and all.

    Raises:
        InputError: an unknown component, one that is in no layer or is no vector of each position,
            neurons that there are not, or nothing at all.
    """
    parts, sizes = [], model.site_map
    for component in components:
        what = patched_component(model, component)
        if what.per_loop or what.kind not in ("residual", "head", "neuron"):
            raise InputError(
                "components",
                expected="components inside a layer that have a vector at each position",
                given=repr(component),
                fix="Pass z, attn_out, mlp_out or post, for instance.",
            )
        for layer in range(sizes.n_layers):
            site, words = (what.full, layer), f"{what.name} {layer}"
            if what.kind == "head":
                heads = range(sizes.n_heads)
                kind = "head" if what.name == "z" else what.name
                parts += [Part(f"{kind} {layer}.{h}", {site: [(h,)]}) for h in heads]
            else:
                words = {"mlp_out": "MLP", "attn_out": "attention"}.get(what.name, what.name)
                parts.append(Part(f"{words} {layer}", {site: [()]}))
    for name, group in (neurons or {}).items():
        for neuron in group:
            check_integer(f"neurons[{name!r}]", neuron, least=0, most=sizes.d_mlp - 1)
        for layer in range(sizes.n_layers):
            parts.append(Part(f"{name} {layer}", {(_NEURONS, layer): [([*group],)]}))
    if not parts or any(not group for group in (neurons or {}).values()):
        raise InputError(
            "components",
            expected="at least one component or group of neurons, and neurons in each group",
            given="none",
            fix="Leave components out for the heads and the MLPs.",
        )
    if together:
        where: dict[Site, list[tuple[Any, ...]]] = {}
        for part in parts:
            for site, indices in part.where.items():
                where.setdefault(site, []).extend(indices)
        parts.append(Part(TOGETHER, where))
    return parts


def chosen_spans(when: Sequence[str], loops: Index, n_loops: int) -> list[tuple[str, range]]:
    """The loops at which a part is ablated, under what each choice is called.

    Raises:
        InputError: an unknown choice, or none; loops that there are not, or that none speaks of.

    Example:
        >>> [name for name, _ in chosen_spans(("all", "upto"), [1, 2], 4)]
        ['all loops', 'up to loop 1', 'up to loop 2']
    """
    if not when:
        raise unknown_name("when", "", WHEN)
    for choice in when:
        check_choice("when", choice, WHEN)
    if loops is not None and set(when) == {"all"}:
        raise InputError(
            "loops",
            expected="None with when=('all',)",
            given=repr(loops),
            fix="Leave loops out, or add 'one', 'from' or 'upto'.",
        )
    spans: list[tuple[str, range]] = []
    for choice in dict.fromkeys(when):
        if choice == "all":
            spans.append(("all loops", range(n_loops)))
            continue
        for t in chosen_loops(loops, n_loops):
            name, span = {
                "one": (f"loop {t}", range(t, t + 1)),
                "from": (f"from loop {t}", range(t, n_loops)),
                "upto": (f"up to loop {t}", range(t + 1)),
            }[choice]
            spans.append((name, span))
    return spans


def chosen_places(
    positions: str | None, inputs: Tensor
) -> tuple[Bool[Tensor, "place pos"], list[int | str]]:
    """Where each ablation is made, and what the places are called.

    Raises:
        InputError: another word than "each".
    """
    n_pos = inputs.shape[1]
    if positions is None:
        return torch.ones(1, n_pos, dtype=torch.bool, device=inputs.device), ["all"]
    if positions != EACH:
        raise unknown_name("positions", positions, [EACH])
    return torch.eye(n_pos, dtype=torch.bool, device=inputs.device), list(range(n_pos))
