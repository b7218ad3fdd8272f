"""EAP-IG's own code as a method of the benchmark.

    git clone https://github.com/hannamw/EAP-IG /somewhere/EAP-IG; pip install matplotlib
    EAP_IG=/somewhere/EAP-IG python -m analyses.circuit_benchmark \\
        --kind edges --method analyses.outside_eap_ig:scores

Its code is not part of this project: it is read from a checkout (795f560 was tried), and runs here
with three things changed: names that TransformerLens 4 no longer has, "cuda", and one line that
fails on models of one head. To it a run of T loops over L layers is a model of T·L layers whose
stream is a plain sum. A looped model's is not: between two loops the recall may drop, keep or mix
what the block wrote, and what its scores lose by that is part of what is measured.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loopinterp.benchmark import Exercise, edges_of_eap_graph
from loopinterp.core.errors import InputError

STEPS = 8
_ONE_HEAD = ("s = s.squeeze(1)", "s = s if isinstance(bwd_index, slice) else s.squeeze(1)")
_FORKS = {f".hook_{x}_input": f".attn.hook_{x}_input" for x in "qkv"}


def scores(exercise: Exercise) -> dict[tuple[str, str], float]:
    """Scores of a run's edges by ``EAP-IG-inputs``, on the pairs of the exercise."""
    attribute, graph_of = _tool()
    model = _AsTransformer(exercise)
    with torch.no_grad():
        base, source = (model(x).argmax(-1) for x in (exercise.base, exercise.source))
    both, differ = torch.stack([source, base], -1), source != base

    def metric(logits: Tensor, *_: Any) -> Tensor:
        pair = logits.gather(-1, both)
        return ((pair[..., 0] - pair[..., 1]) * differ).sum()

    sizes = ("n_layers", "n_heads", "d_model", "parallel_attn_mlp")
    graph = graph_of({name: getattr(model.cfg, name) for name in sizes})
    pairs = [(exercise.base, exercise.source, None)]
    attribute(model, graph, pairs, metric, "EAP-IG-inputs", ig_steps=STEPS, quiet=True)
    edges = {name: {"score": float(edge.score)} for name, edge in graph.edges.items()}
    return edges_of_eap_graph({"edges": edges}, exercise)


class _AsTransformer:
    """A looped model as the tool sees one: a run of fixed loops, tokens as they are."""

    def __init__(self, exercise: Exercise) -> None:
        self._model, self._n_loops = exercise.model, exercise.n_loops
        config, flags = exercise.model.config, {}
        for flag in ("use_split_qkv_input", "use_attn_result", "use_hook_mlp_in"):
            getattr(exercise.model, f"set_{flag}")(True)
            flags[flag] = True
        self.cfg = types.SimpleNamespace(
            n_layers=config.n_prelude + config.n_layers * self._n_loops + config.n_coda,
            n_heads=config.n_heads,
            d_model=config.d_model,
            parallel_attn_mlp=False,
            dtype=torch.float32,
            device="cpu",
            n_key_value_heads=None,
            use_normalization_before_and_after=False,
            **flags,
        )

    def __call__(self, tokens: Tensor, attention_mask: None = None) -> Tensor:
        return self._model(tokens, n_loops=self._n_loops)

    def hooks(self, fwd_hooks: Any = (), bwd_hooks: Any = ()) -> AbstractContextManager[Any]:
        forward, backward = (
            [(_renamed(name), hook) for name, hook in of] for of in (fwd_hooks, bwd_hooks)
        )
        return self._model.hooks(forward, backward, n_loops=self._n_loops)


def _renamed(name: str) -> str:
    for theirs, ours in _FORKS.items():
        if name.endswith(theirs):
            return name.removesuffix(theirs) + ours
    return name


class _OnTheCpu(types.ModuleType):
    """``torch``, for code that names a device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *sizes: Any, device: Any = None, **options: Any) -> Tensor:
        return torch.zeros(*sizes, **options)


@functools.cache
def _tool() -> tuple[Any, Any]:
    """Its ``attribute``, and its ``Graph.from_model``.

    Raises:
        InputError: There is no checkout where EAP_IG says.
    """
    import transformer_lens

    folder = Path(os.environ.get("EAP_IG", "")) / "src"
    if not (folder / "eap" / "attribute.py").exists():
        raise InputError(
            "EAP_IG",
            expected="the folder of a checkout of EAP-IG",
            given=repr(os.environ.get("EAP_IG")),
            fix="Clone https://github.com/hannamw/EAP-IG, and set EAP_IG to where it is.",
        )
    sys.path.insert(0, str(folder))
    for gone in ("HookedTransformer", "HookedTransformerConfig"):
        setattr(transformer_lens, gone, type(gone, (), {}))
    masks = types.ModuleType("transformer_lens.utils")
    masks.get_attention_mask = None  # type: ignore[attr-defined]
    sys.modules["transformer_lens.utils"] = masks
    from eap import utils  # type: ignore[import-not-found]
    from eap.graph import Graph  # type: ignore[import-not-found]

    source = Path(utils.__file__).read_text()
    exec(compile(source.replace(*_ONE_HEAD), utils.__file__, "exec"), utils.__dict__)
    from eap import attribute  # type: ignore[import-not-found]

    attribute.torch = _OnTheCpu("torch")
    attribute.tokenize_plus = lambda _, tokens, *__: (tokens, None, None, tokens.shape[1])
    return attribute.attribute, Graph.from_model
