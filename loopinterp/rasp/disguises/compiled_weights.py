"""What disguises share: a compiled model's weights, taken out, moved and put back; random draws."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import check_seed
from loopinterp.models.looped_transformer import LoopedTransformer
from loopinterp.rasp.compiler.compiled import Compiled, need_compiled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.models.model_config import LoopedTransformerConfig
    from loopinterp.rasp.compiler.circuit import Circuit

Weights = dict[str, "Tensor"]


def weights_of(compiled: Compiled) -> Weights:
    """A copy of all weights, in float64 on the CPU, so that disguises add no rounding errors."""
    need_compiled(compiled)
    return {name: w.detach().cpu().double() for name, w in compiled.model.state_dict().items()}


def rebuilt(
    compiled: Compiled, weights: Weights, circuit: Circuit, disguise: str, **changes: Any
) -> Compiled:
    """A compiled model with other weights, where and as precise as it was.

    ``disguise`` says what was done, for the circuit's record; ``changes`` are fields of the
    model's configuration.
    """
    old = compiled.model
    model = LoopedTransformer(old.config.replace(**changes)).to(device=old.device, dtype=old.dtype)
    model.load_state_dict(weights)
    circuit = dataclasses.replace(circuit, disguises=(*circuit.disguises, disguise))
    return Compiled(model, circuit, compiled.program)


def layers(config: LoopedTransformerConfig) -> Iterator[tuple[str, int, str]]:
    """(section, layer, prefix of its weights) of all layers, in the order in which they run."""
    sections = (("prelude", config.n_prelude), ("block", config.n_layers), ("coda", config.n_coda))
    for section, n_layers in sections:
        for layer in range(n_layers):
            yield section, layer, f"{section}.{layer}."


def by_head(weights: Weights, name: str, n_heads: int) -> Tensor:
    """A view by head: [3, head, d_head, …], or [d_model, head, d_head] of what heads write."""
    w = weights[name]
    if name.endswith("out.weight"):
        return w.view(len(w), n_heads, -1)
    return w.view(3, n_heads, -1, *w.shape[1:])


def moved(
    weights: Weights,
    write: Float[Tensor, "new_d_model d_model"],
    read: Float[Tensor, "d_model new_d_model"],
) -> Weights:
    """The weights in a residual stream that holds, and is read, as these matrices say."""
    result = {}
    for name, w in weights.items():
        parent, kind = name.split(".")[-2:]
        if parent in ("out", "fc_out"):
            result[name] = write @ w
        elif kind == "bias":
            result[name] = w
        elif parent in ("embedding", "position_embedding"):
            result[name] = w @ write.mT
        elif parent in ("qkv", "fc_in", "unembedding"):
            result[name] = w @ read
        else:  # recall: reads the stream and writes it
            result[name] = write @ w @ read
    return result


def generator(seed: int) -> torch.Generator:
    """A random stream.

    Raises:
        InputError: the seed is no integer from 0 to 2**63 - 1.
    """
    return torch.Generator().manual_seed(check_seed(seed))


def normal(*shape: int, g: torch.Generator) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def random_rotation(size: int, g: torch.Generator) -> Float[Tensor, "size size"]:
    """An orthogonal matrix, each as likely as any other (Mezzadri 2007, math-ph/0609050)."""
    q, r = torch.linalg.qr(normal(size, size, g=g))
    return q * r.diagonal().sign()
