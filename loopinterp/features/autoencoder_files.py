"""Reading saved autoencoders: this package's files, and the folders of SAELens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopinterp.core.boundary import checked
from loopinterp.core.errors import CheckpointError, ConfigError, spell_choices
from loopinterp.core.storage import (
    parse_json_object,
    read_json_object,
    read_tensors,
    read_tensors_and_metadata,
)
from loopinterp.features.autoencoder import HEADER, AutoencoderConfig, SparseAutoencoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

# Activation functions by the architectures of SAELens.
_ACTIVATIONS = {"standard": "relu", "topk": "topk", "jumprelu": "jumprelu", "gated": "gated"}
_ACTIVATIONS |= {"transcoder": "relu", "skip_transcoder": "relu"}
_ACTIVATIONS |= {"jumprelu_transcoder": "jumprelu", "jumprelu_skip_transcoder": "jumprelu"}


@checked
def load_autoencoder(path: str | Path) -> SparseAutoencoder:
    """Read a saved autoencoder or transcoder.

    Args:
        path: A file of :meth:`SparseAutoencoder.save`, or a folder of SAELens 6
            (``cfg.json`` and ``sae_weights.safetensors``): its standard, top-k, JumpReLU and gated
            autoencoders and its transcoders. Its batch-top-k ones are saved as JumpReLU.

    Returns:
        The autoencoder in the type of the file; ``about`` holds SAELens' metadata.

    Raises:
        CheckpointError: If it is missing, damaged, or of another kind.

    Example:
        >>> import tempfile
        >>> autoencoder = SparseAutoencoder(AutoencoderConfig(d_in=4, n_features=8))
        >>> path = autoencoder.save(Path(tempfile.mkdtemp()) / "features.safetensors")
        >>> load_autoencoder(path).config == autoencoder.config
        True
    """
    path = Path(path)
    if path.is_dir():
        cfg = read_json_object(path / "cfg.json")
        config = _of_sae_lens(path, cfg)
        about = cfg.get("metadata")
        weights = read_tensors(path / "sae_weights.safetensors")
        return _built(path, config, weights, about if isinstance(about, dict) else {})
    weights, texts = read_tensors_and_metadata(path)
    header = parse_json_object(texts.get(HEADER, "")) or {}
    config = header.get("config")
    if not isinstance(config, dict):
        expected, fix = "one that SparseAutoencoder.save wrote", "Pass that file, or the folder."
        raise CheckpointError(f"file {path}", expected=expected, given="another file", fix=fix)
    return _built(path, config, weights, header.get("about") or {})


def _built(
    path: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], about: Mapping[str, Any]
) -> SparseAutoencoder:
    try:
        autoencoder = SparseAutoencoder(AutoencoderConfig.from_dict(config), about=about)
        autoencoder.load_state_dict(weights, assign=True)
    except (ConfigError, RuntimeError) as error:
        expected, got = "weights and settings that fit", str(error).replace("\n", " ")
        fix = "Save the autoencoder again."
        raise CheckpointError(
            f"autoencoder {path}", expected=expected, given=got, fix=fix
        ) from None
    return autoencoder.requires_grad_(True)


def _of_sae_lens(path: Path, cfg: Mapping[str, Any]) -> dict[str, Any]:
    what = f"autoencoder {path}"
    fix = "Load it with SAELens, fold it, and save it again (save_inference_model)."
    if "activation_fn_str" in cfg or not {"architecture", "d_in", "d_sae"} <= cfg.keys():
        got = "another format, or that of a version before"
        raise CheckpointError(what, expected="settings of SAELens 6", given=got, fix=fix)
    kind = cfg["architecture"]
    if kind not in _ACTIVATIONS:
        expected = spell_choices(sorted(_ACTIVATIONS))
        fix = "Save one that was trained with save_inference_model."
        raise CheckpointError(f"{what}: architecture", expected=expected, given=repr(kind), fix=fix)
    normalise = cfg.get("normalize_activations", "none")
    if normalise in ("expected_average_only_in", "covariance_whitening"):
        # Its numbers are not in this folder, unless they have been folded into the weights.
        expected = "a normalisation that is folded into the weights"
        raise CheckpointError(what, expected=expected, given=normalise, fix=fix)
    config = {"d_in": cfg["d_in"], "n_features": cfg["d_sae"], "activation": _ACTIVATIONS[kind]}
    config |= {"normalise": normalise}
    if kind == "topk":
        config |= {"k": cfg.get("k"), "scale_by_norm": cfg.get("rescale_acts_by_decoder_norm")}
    if "transcoder" in kind:
        return config | {"d_out": cfg.get("d_out"), "skip": "skip" in kind}
    return config | {"subtract_bias": cfg.get("apply_b_dec_to_input", True)}
