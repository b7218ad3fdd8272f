"""HRM and TRM: post-norm layers in nested loops over all positions at once.

TRM has one stack for both cycles. The published code of HRM runs segments of ``H_cycles`` slow
cycles, with gradients in the last step and a halting head after each; here every cycle has both.

Sources: arXiv 2506.21734 and the published ``hrm_act_v1.py``; arXiv 2510.04871 and ``trm.py``.

A checkpoint's folder has ``all_config.yaml`` and, for each saved step, a state dict of
``torch.save`` with names such as ``_orig_mod.model.inner.H_init``.

Sources: ``pretrain.py`` of sapientinc/HRM and of SamsungSAILMontreal/TinyRecursiveModels.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import PositiveInt, TypeAdapter, ValidationError

from loopinterp.adapters.nested_loops import NestedModel, nested_sites
from loopinterp.adapters.plain import hrm
from loopinterp.adapters.published_model import (
    gated,
    join_heads,
    layer_sites,
    rms_norm,
    rotate_halves,
    split_heads,
)
from loopinterp.core.boundary import checked
from loopinterp.core.errors import CheckpointError, InputError, unknown_name
from loopinterp.core.storage import read_bytes
from loopinterp.models.checkpoints import check_tensors
from loopinterp.models.layers import attend
from loopinterp.models.positions import AttentionContext
from loopinterp.models.taps import NO_TAPS, SILENT, Tap, Taps
from loopinterp.models.weights import seeded

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Integer
    from torch import Tensor

    from loopinterp.models.attribution import AttributionPass


# Sites of an MLP over the positions, in place of those of attention
_MIXING = {
    "hook_resid_pre": "residual",
    "mlp_t.hook_post": "pos_neuron",
    "hook_mix_out": "residual",
    "ln1_post.hook_scale": "feature_scale",
    "ln1_post.hook_normalized": "turned",
}


class HRMAdapter(NestedModel):
    """HRM (``HierarchicalReasoningModel_ACTV1``) with our addresses; a loop is one slow cycle.

    Puzzle embeddings have positions before those of the tokens, also in inputs, states and logits
    (:meth:`with_puzzle`).
    """

    needs = (
        "inner.embed_tokens.embedding_weight",
        "inner.H_level.layers.0.self_attn.qkv_proj",
        "inner.L_level.layers.0.mlp.gate_up_proj",
        "inner.q_head",
        "inner.H_init",
        "inner.L_init",
    )

    several_devices = offloads = False  # weights are read without a call

    _slow_stack = "H_level"

    def __init__(self, published: Any) -> None:
        inner, config = published.inner, published.inner.config
        fast, slow = inner.L_level, getattr(inner, self._slow_stack)
        self._mixing = getattr(config, "mlp_t", False)
        self._rotary = config.pos_encodings == "rope"
        layer = layer_sites(before=False, after=True, of_sum=True, rotary=self._rotary)
        if self._mixing:
            attention = ("attn.", "ln1_post.", "hook_attn_out")
            layer = _MIXING | {k: x for k, x in layer.items() if not k.startswith(attention)}
        embedding = {"hook_embed": "residual"}
        if config.pos_encodings == "learned":
            embedding["hook_pos_embed"] = "residual"
        n_heads, width = int(config.num_heads), int(config.hidden_size)
        first = fast.layers[0]
        neurons = first.mlp_t.down_proj.weight.shape[1] if self._mixing else 0
        self.n_puzzle_positions = int(inner.puzzle_emb_len) if hasattr(inner, "puzzle_emb") else 0
        super().__init__(
            published,
            nested_sites(
                [layer] * len(fast.layers),
                [layer] * len(slow.layers),
                int(config.L_cycles),
                d_model=width,
                n_heads=n_heads,
                d_head=width // n_heads,
                d_mlp=first.mlp.down_proj.weight.shape[1],
                embedding=embedding,
                closing={"hook_halt": "halt"},
                more_axes={
                    "halt": (2,),
                    "pos_neuron": (width, neurons),
                    "feature_scale": (width, 1),
                    "turned": (width, "pos"),
                },
            ),
            n_loops=int(config.H_cycles) * int(config.halt_max_steps),
            d_vocab=inner.embed_tokens.embedding_weight.shape[0],
            d_vocab_out=inner.lm_head.weight.shape[0],
            causal=False,
            n_ctx=int(config.seq_len) + self.n_puzzle_positions,
        )

    @property
    def stacks(self) -> tuple[Any, Any, int]:
        inner = self.published.inner
        return inner.L_level, getattr(inner, self._slow_stack), int(inner.config.L_cycles)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations, to which the weights are cast."""
        return self.published.inner.forward_dtype

    def float(self) -> HRMAdapter:
        """Weights and activations in float32."""
        self.published.inner.forward_dtype = torch.float32
        self.published.inner.config.forward_dtype = "float32"
        for module in self.published.modules():  # embeddings cast their rows
            if hasattr(module, "cast_to"):
                module.cast_to = torch.float32
        return super().float()

    def initial_state(
        self, e: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_state"]:
        """``H_init`` and ``L_init``, the same at every position."""
        return self.start(self.published.inner.H_init, self.published.inner.L_init, e)

    def with_puzzle(
        self, tokens: Integer[Tensor, "batch pos"], puzzles: Integer[Tensor, " batch"]
    ) -> Integer[Tensor, "batch place"]:
        """The model's inputs: the number of each puzzle at its positions, then the tokens."""
        places = puzzles.to(tokens.device)[:, None].expand(-1, self.n_puzzle_positions)
        return torch.cat((places, tokens), dim=1)  # in the wider of their types

    def check_inputs(
        self, inputs: Tensor, *, position_offset: int | Int[Tensor, " batch"] = 0
    ) -> None:
        n_puzzle = self.n_puzzle_positions
        if n_puzzle and isinstance(inputs, torch.Tensor) and inputs.dim() == 2:
            number = len(self.published.inner.puzzle_emb.weights)
            puzzle = inputs[:, :n_puzzle]
            # [batch, puzzle pos]: one number that the model has, the same at all its positions.
            good = (puzzle == puzzle[:, :1]) & (puzzle >= 0) & (puzzle < number)
            if not (inputs.shape[1] > n_puzzle and good.all()):
                expected = f"a puzzle's number below {number} at the first {n_puzzle} positions"
                got = f"{inputs.shape[1]} positions, {puzzle[~good.all(1)][:1].tolist()} of them"
                fix = "Pass model.with_puzzle(tokens, puzzles)."
                raise InputError("inputs", expected=expected, given=got, fix=fix)
            inputs = torch.cat((torch.zeros_like(puzzle), inputs[:, n_puzzle:]), dim=1)
        super().check_inputs(inputs, position_offset=position_offset)

    def rotation(self, n_pos: int) -> tuple[Tensor, Tensor] | None:
        if not self._rotary:
            return None
        cos, sin = self.published.inner.rotary_emb()
        return cos[:n_pos], sin[:n_pos]

    def length_context(self, n_pos: int, *, all_pairs: bool = False) -> AttentionContext:
        if self._mixing and n_pos != self.config.n_ctx:
            expected = f"{self.config.n_ctx} positions, which an MLP mixes"
            fix = "Pad the input as in training."
            raise InputError("inputs", expected=expected, given=str(n_pos), fix=fix)
        return super().length_context(n_pos, all_pairs=all_pairs)

    def run_embedding(self, inputs: Tensor, context: AttentionContext, taps: Taps) -> Tensor:
        inner, top, prefix = self.published.inner, taps.at("top"), self.n_puzzle_positions
        e = inner.embed_tokens(inputs[:, prefix:].int())
        if prefix:
            # [batch, n * d_model], filled up with zeros and cut into the puzzle's positions
            puzzle, width = inner.puzzle_emb, e.shape[-1]
            vectors = puzzle.weights[inputs[:, 0].long()].to(puzzle.cast_to)
            vectors = F.pad(vectors, (0, prefix * width - vectors.shape[-1]))
            e = torch.cat((vectors.unflatten(-1, (-1, width)), e), dim=1)
        if inner.config.pos_encodings != "learned":
            return top("hook_embed", inner.embed_scale * e)
        scale = inner.embed_scale * 0.707106781  # as the published code spells the root of a half
        place = inner.embed_pos.embedding_weight[: e.shape[1]].to(e)
        return top("hook_embed", scale * e) + top("hook_pos_embed", (scale * place).expand_as(e))

    def layer(self, layer: Any, h: Tensor, context: AttentionContext, tap: Tap = SILENT) -> Tensor:
        """``norm(h + attn(h))``, then ``norm(h + mlp(h))``, by norms without weights."""
        h = self.mix(layer, tap("hook_resid_pre", h), context, tap)
        h = tap("hook_resid_mid", h)
        # [batch, pos, d_mlp] each
        pre, linear = layer.mlp.gate_up_proj(tap("hook_mlp_in", h)).chunk(2, dim=-1)
        x = layer.mlp.down_proj(gated(pre, linear, F.silu, tap))
        h = rms_norm(h + tap("hook_mlp_out", x), None, layer.norm_eps, tap, "ln2_post")
        return tap("hook_resid_post", h)

    def mix(self, layer: Any, h: Tensor, context: AttentionContext, tap: Tap) -> Tensor:
        d_head, x = self.site_map.d_head, layer.self_attn.qkv_proj(tap("hook_attn_in", h))
        q, k, v = (split_heads(part, d_head) for part in x.chunk(3, dim=-1))
        z = attend(q, k, v, context, tap, turn=rotate_halves)
        x = tap("hook_attn_out", layer.self_attn.o_proj(join_heads(z)))
        return rms_norm(h + x, None, layer.norm_eps, tap, "ln1_post")

    def attribute_layer(self, layer: Any, backward: AttributionPass) -> None:
        backward.through_norm("ln2_post")
        backward.write("mlp", backward.read("hook_mlp_out"))
        self.attribute_mix(layer, backward)

    def attribute_mix(self, layer: Any, backward: AttributionPass) -> None:
        backward.through_norm("ln1_post")
        backward.write_heads(*self.affine(layer.self_attn.o_proj))

    def run_loop(
        self, h: Tensor, e: Tensor, context: AttentionContext, taps: Taps = NO_TAPS, loop: int = 0
    ) -> Tensor:
        h, tap = super().run_loop(h, e, context, taps, loop), taps.at("block", loop)
        if tap.listens("hook_halt"):
            tap("hook_halt", self.halting(h))
        return h

    def halting(
        self, state: Float[Tensor, "*loop batch pos d_state"]
    ) -> Float[Tensor, "*loop batch answer"]:
        """The halting head's two numbers at the first position: to stop, and to go on."""
        return self.published.inner.q_head(self.part(state, "z_H")[..., 0, :])

    def exit_probability(
        self, state: Float[Tensor, "*loop batch pos d_state"]
    ) -> Float[Tensor, "*loop batch pos"]:
        """``sigmoid(stop - go on)``, above a half where the published code halts."""
        # [..., batch], the same at every position
        stop, go_on = self.halting(state).float().unbind(-1)
        return (stop - go_on).sigmoid()[..., None].expand(state.shape[:-1])

    @property
    def head(self) -> Any:
        return self.published.inner.lm_head


class TRMAdapter(HRMAdapter):
    """TRM (``TinyRecursiveReasoningModel_ACTV1``) with our addresses; a loop is one slow cycle.

    With ``mlp_t`` an MLP over the positions replaces attention, with the sites ``hook_mix_out`` and
    ``mlp_t.hook_post`` ``[batch, feature, neuron]``; ``ln1_post.hook_scale`` is then
    ``[batch, feature, 1]``.
    """

    needs = (
        "inner.embed_tokens.embedding_weight",
        "inner.L_level.layers.0.mlp.gate_up_proj",
        "inner.q_head",
        "inner.H_init",
        "inner.L_init",
    )

    _slow_stack = "L_level"  # one stack for both

    @classmethod
    def fits(cls, model: Any) -> bool:
        """Whether a model has the parts, and no slow stack of its own."""
        return super().fits(model) and not hasattr(model.inner, "H_level")

    def exit_probability(
        self, state: Float[Tensor, "*loop batch pos d_state"]
    ) -> Float[Tensor, "*loop batch pos"]:
        """``sigmoid(stop)``, or ``sigmoid(stop - go on)`` where the model learnt to go on."""
        if not self.published.inner.config.no_ACT_continue:
            return super().exit_probability(state)
        stop = self.halting(state)[..., 0].float()  # [..., batch], the same at every position
        return stop.sigmoid()[..., None].expand(state.shape[:-1])

    def mix(self, layer: Any, h: Tensor, context: AttentionContext, tap: Tap) -> Tensor:
        if not self._mixing:
            return super().mix(layer, h, context, tap)
        x = h.mT  # [batch, feature, pos]: the norm is over positions too
        pre, linear = layer.mlp_t.gate_up_proj(x).chunk(2, dim=-1)
        neurons = tap("mlp_t.hook_post", F.silu(pre) * linear)
        x = tap("hook_mix_out", layer.mlp_t.down_proj(neurons).mT)
        return rms_norm((h + x).mT, None, layer.norm_eps, tap, "ln1_post").mT

    def attribute_mix(self, layer: Any, backward: AttributionPass) -> None:
        if not self._mixing:
            super().attribute_mix(layer, backward)
            return
        backward.through_scale(1 / backward.read("ln1_post.hook_scale").mT)
        backward.write("mixing", backward.read("hook_mix_out"))


SETTINGS = "all_config.yaml"


class _Code(NamedTuple):
    model: Callable[[dict[str, Any]], hrm.ACTWrapper]
    config: type[hrm.HRMConfig]
    defaults: dict[str, Any]


_HRM = _Code(hrm.HierarchicalReasoningModel_ACTV1, hrm.HRMConfig, {"forward_dtype": "bfloat16"})
_TRM = _Code(
    hrm.TinyRecursiveReasoningModel_ACTV1,
    hrm.TRMConfig,
    {"forward_dtype": "bfloat16", "puzzle_emb_len": 16},
)
_CODE = {
    "hrm.hrm_act_v1@HierarchicalReasoningModel_ACTV1": _HRM,
    "recursive_reasoning.hrm@HierarchicalReasoningModel_ACTV1": _HRM,
    "recursive_reasoning.trm@TinyRecursiveReasoningModel_ACTV1": _TRM,
}
_SIZES = (
    *("H_cycles", "L_cycles", "H_layers", "L_layers", "hidden_size", "num_heads"),
    *("halt_max_steps", "expansion"),
)
_NEEDED = (*_SIZES, "pos_encodings")  # no published default, and they decide the computation
_DTYPES = ("bfloat16", "float16", "float32")


def is_puzzle_checkpoint(path: str) -> bool:
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    return os.path.exists(path) and os.path.isfile(os.path.join(folder, SETTINGS))


@checked
def read_puzzle_checkpoint(path: str, *, seq_len: PositiveInt | None = None) -> hrm.ACTWrapper:
    """HRM or TRM from a file of weights beside ``all_config.yaml``, in evaluation mode.

    Weights are read with ``weights_only``, which runs no code of the file.

    Args:
        path: The file of weights, or a folder with one such file.
        seq_len: Positions of the data set's puzzles, if the weights do not tell.

    Raises:
        CheckpointError: If a file is damaged, or the architecture or tensors are others.
        InputError: If ``seq_len`` is missing, or is not the weights' own.
    """
    file = Path(path)
    if file.is_dir():
        # Beside step_1000 there may be step_1000_all_preds.0, of the same format.
        files = sorted(
            x
            for x in file.iterdir()
            if x.is_file() and x.suffix in ("", ".pt", ".pth")
            if "_preds" not in x.name and not x.name.startswith(".")
        )
        if len(files) != 1:
            shown = ", ".join(x.name for x in files[-6:]) or "none"
            expected, fix = "one file of weights", "Pass the path of one, such as FOLDER/step_1000."
            raise InputError(f"model {file}", expected=expected, given=shown, fix=fix)
        (file,) = files
    code, sizes = _read_settings(file.parent / SETTINGS)
    weights = _read_weights(file)
    sizes["vocab_size"] = _rows(weights, "embed_tokens.embedding_weight", file)
    width = sizes.get("puzzle_emb_ndim", 0)
    if width:
        sizes["num_puzzle_identifiers"] = _rows(weights, "puzzle_emb.weights", file)
    prefix = sizes.get("puzzle_emb_len") or -(-width // sizes["hidden_size"])
    sizes["seq_len"] = _length(weights, seq_len, prefix)
    with seeded(0):  # its first weights are replaced
        model = code.model(sizes).eval()
    fix = f"Restore the file, or the {SETTINGS} that it was saved with."
    check_tensors(weights, model.state_dict(), f"weights {file}", fix=fix)
    model.load_state_dict(weights)
    return model


def _read_settings(path: Path) -> tuple[_Code, dict[str, Any]]:
    import yaml

    fix = "Restore the file that the training code wrote."
    try:
        document = yaml.safe_load(read_bytes(path))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        got = f"damaged content ({type(error).__name__})"
        raise CheckpointError(f"file {path}", expected="YAML", given=got, fix=fix) from error
    arch = document.get("arch") if isinstance(document, dict) else None
    if not isinstance(arch, dict) or not isinstance(arch.get("name"), str):
        expected, got = "settings with arch.name", "none"
        raise CheckpointError(f"file {path}", expected=expected, given=got, fix=fix)
    values = {k: x for k, x in arch.items() if k not in ("name", "loss")}
    code = _CODE.get(arch["name"])
    if code is _HRM and not values.get("mlp_t", False):
        values.pop("mlp_t", None)  # of the copy of HRM in TRM's repository
    if code is None or (code is _HRM and "mlp_t" in values):
        expected = f"an architecture that is rebuilt here: {', '.join(_CODE)}"
        got = f"{arch['name']}" + (" with mlp_t" if "mlp_t" in values else "")
        fix = "If its module computes as one of these, build it by its own code: adapt(module)."
        raise CheckpointError(f"arch.name of {path}", expected=expected, given=got, fix=fix)
    return code, _checked_settings(code, values, path)


def _checked_settings(code: _Code, values: dict[str, Any], path: Path) -> dict[str, Any]:
    """The settings, each of its type: an unknown one may change the computation."""
    what, fix = f"arch of {path}", "Restore the file that the training code wrote."
    fields = [field.name for field in dataclasses.fields(code.config)]
    for name in values:
        if name not in fields:
            raise unknown_name(what, str(name), fields, error=CheckpointError)
    for name in _NEEDED:
        if name not in values:
            raise CheckpointError(what, expected=name, given="none", fix=fix)
    try:
        config = TypeAdapter(code.config).validate_python({**code.defaults, **values})
    except ValidationError as error:
        first = error.errors()[0]
        expected, got = first["msg"], f"{'.'.join(map(str, first['loc']))} = {first['input']!r}"
        raise CheckpointError(what, expected=expected, given=got, fix=fix) from error
    for name in _SIZES:
        size = getattr(config, name)
        if size < 0 or (size == 0 and name != "H_layers"):  # TRM has no slow layers
            got = f"{name} = {size}"
            raise CheckpointError(what, expected="sizes of a model", given=got, fix=fix)
    if config.forward_dtype not in _DTYPES:
        expected, got = " or ".join(_DTYPES), f"forward_dtype = {config.forward_dtype!r}"
        raise CheckpointError(what, expected=expected, given=got, fix=fix)
    return {name: getattr(config, name) for name in {**code.defaults, **values}}


def _read_weights(path: Path) -> dict[str, Tensor]:
    expected, fix = "a state dict of HRM or TRM (torch.save)", "Restore the file from a copy."
    try:
        state = torch.load(io.BytesIO(read_bytes(path)), map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises errors of any type
        got = f"a file that does not load ({type(error).__name__})"
        raise CheckpointError(f"file {path}", expected=expected, given=got, fix=fix) from error
    names = list(state) if isinstance(state, dict) else []
    first = str(names[0]) if names else ""
    # torch.compile, the loss and data parallelism each put a name of theirs in front.
    prefix = first[: first.find("inner.")] if "inner." in first else None
    for name in names:
        if prefix is None or not isinstance(name, str) or not name.startswith(f"{prefix}inner."):
            got = f"a tensor {str(name)[:80]!r}"
            raise CheckpointError(f"file {path}", expected=expected, given=got, fix=fix)
    if not names:
        got = f"a {type(state).__name__} without tensors"
        raise CheckpointError(f"file {path}", expected=expected, given=got, fix=fix)
    return {name.removeprefix(prefix): x for name, x in state.items()}


def _rows(weights: dict[str, Tensor], name: str, path: Path) -> int:
    table = weights.get(f"inner.{name}")
    if table is None or table.dim() != 2:
        fix = f"Restore the file, or the {SETTINGS} that it was saved with."
        got = "none" if table is None else f"a tensor of {table.dim()} axes"
        raise CheckpointError(f"weights {path}", expected=f"inner.{name}", given=got, fix=fix)
    return len(table)


def _length(weights: dict[str, Tensor], seq_len: int | None, prefix: int) -> int:
    with_positions = (
        weights.get("inner.embed_pos.embedding_weight"),
        weights.get("inner.L_level.layers.0.mlp_t.down_proj.weight"),  # [pos, neuron]
    )
    known = next((len(x) - prefix for x in with_positions if x is not None and x.dim()), None)
    if known is None and seq_len is None:
        expected = "the positions of a puzzle, which these weights do not tell"
        fix = "Pass seq_len=, as in the data set's dataset.json (sudoku 81, ARC and mazes 900)."
        raise InputError("seq_len", expected=expected, given="None", fix=fix)
    if None not in (known, seq_len) and known != seq_len:
        expected, fix = f"{known}, as in the weights", "Leave it out."
        raise InputError("seq_len", expected=expected, given=str(seq_len), fix=fix)
    length = seq_len if known is None else known
    assert length is not None
    return length
