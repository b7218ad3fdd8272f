"""Write the files of ``tests/features/sae_lens``, with SAELens itself (version 6.54.12).

    python tests/features/make_sae_lens_files.py

needs ``sae-lens``, which needs a TransformerLens before version 4, so an environment of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parent / "sae_lens"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "standard": ("standard", {}),
    "topk": ("topk", {"k": 2, "rescale_acts_by_decoder_norm": True}),
    "jumprelu": ("jumprelu", {"normalize_activations": "layer_norm"}),
    "gated": ("gated", {"apply_b_dec_to_input": False}),
    "constant": ("standard", {"normalize_activations": "constant_norm_rescale"}),
    "transcoder": ("transcoder", {"d_out": 3, "apply_b_dec_to_input": False}),
    "jumprelu_skip": ("jumprelu_skip_transcoder", {"d_out": 3, "apply_b_dec_to_input": False}),
}
"""Architectures of SAELens and their options."""


@torch.no_grad()
def write(name: str, folder: Path) -> None:
    """A random autoencoder as SAELens saves it, and what it makes of random activations."""
    from sae_lens.registry import get_sae_class  # type: ignore[import-not-found]
    from safetensors.torch import save_file

    architecture, options = CASES[name]
    kind, config = get_sae_class(architecture)
    generator = torch.Generator().manual_seed(sorted(CASES).index(name))
    saved = kind(config(d_in=4, d_sae=6, **options))
    for weight in saved.parameters():
        weight.copy_(0.7 * torch.randn(weight.shape, generator=generator))
    if hasattr(saved, "threshold"):
        saved.threshold.abs_()
    saved.cfg.metadata.hook_name = "loops.1.hook_state_post"
    saved.save_model(folder / name)
    again = kind.load_from_disk(folder / name)
    x = torch.randn(2, 3, 4, generator=generator)
    tensors = {"x": x, "features": again.encode(x), "reconstruction": again(x)}
    tensors = {key: tensor.clone().contiguous() for key, tensor in tensors.items()}
    save_file(tensors, folder / name / "recorded.safetensors")


if __name__ == "__main__":
    for case in CASES:
        write(case, FOLDER)
