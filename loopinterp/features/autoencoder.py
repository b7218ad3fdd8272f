"""Sparse autoencoders and transcoders: SAELens' folders, their own files, and their training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import nn

from loopinterp.core.boundary import checked
from loopinterp.core.errors import (
    CheckpointError,
    ConfigError,
    InputError,
    describe_tensor,
    spell_choices,
)
from loopinterp.core.settings import OnlyWith, Seed, Settings, settings
from loopinterp.core.storage import (
    json_default,
    parse_json_object,
    read_json_object,
    read_tensors,
    read_tensors_and_metadata,
    write_tensors,
)
from loopinterp.core.text import track
from loopinterp.models.taps import recording_gradients

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


_HEADER = "loopinterp.autoencoder"  # the entry of a saved file's metadata with the settings
# Activation functions by the architectures of SAELens.
_ACTIVATIONS = {"standard": "relu", "topk": "topk", "jumprelu": "jumprelu", "gated": "gated"}
_ACTIVATIONS |= {"transcoder": "relu", "skip_transcoder": "relu"}
_ACTIVATIONS |= {"jumprelu_transcoder": "jumprelu", "jumprelu_skip_transcoder": "jumprelu"}


@settings
class AutoencoderConfig(Settings):
    """Sizes and kind of a :class:`SparseAutoencoder`.

    Attributes:
        d_in: Width of the activation that is read.
        activation: "relu"; "topk"; "jumprelu", also that of a batch-top-k autoencoder after
            training; or "gated".
        k: Features that may be active at once, of "topk".
        d_out: Of a transcoder: the width of the activation that it writes.
        skip: Whether a transcoder adds a linear map of its input.
        subtract_bias: Whether the bias of the decoder is subtracted from the input.
        normalise: Applied to each input, and undone in its reconstruction.
        scale_by_norm: Whether "topk" chooses features in units of their decoder's norm.
    """

    d_in: PositiveInt
    n_features: PositiveInt
    activation: Literal["relu", "topk", "jumprelu", "gated"] = "relu"
    k: Annotated[PositiveInt | None, OnlyWith("activation", "topk", needed=True)] = None
    d_out: PositiveInt | None = None
    skip: bool = False
    subtract_bias: Annotated[bool, OnlyWith("d_out", None)] = True
    normalise: Annotated[
        Literal["none", "layer_norm", "constant_norm_rescale"], OnlyWith("d_out", None)
    ] = "none"
    scale_by_norm: Annotated[bool, OnlyWith("activation", "topk")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k is not None and self.k > self.n_features:
            expected, fix = f"at most the {self.n_features} features", "Lower k."
            raise ConfigError("k", expected=expected, given=str(self.k), fix=fix)
        if self.skip and self.d_out is None:
            expected, fix = "a transcoder, which has d_out", "Set d_out, or leave skip out."
            raise ConfigError("skip", expected=expected, given="no d_out", fix=fix)


class SparseAutoencoder(nn.Module):
    r"""Features f of an activation x, and its reconstruction.

    .. math::
        f = \sigma\big((x - b_\text{dec}) W_\text{enc} + b_\text{enc}\big), \qquad
        \hat x = f\, W_\text{dec} + b_\text{dec}

    :math:`\sigma` is the ReLU; the ReLU of the k largest entries; the ReLU of entries above a
    threshold (JumpReLU); or, gated, :math:`[z W_\text{enc} + b_\text{gate} > 0] \cdot
    \mathrm{ReLU}(z W_\text{enc} e^{r_\text{mag}} + b_\text{mag})` with
    :math:`z = x - b_\text{dec}`. A transcoder subtracts no bias; its :math:`\hat x`, plus
    :math:`W_\text{skip} x` if it has one, stands for another activation.

    The decoder begins with random directions of norm 1, and the encoder is its transpose.

    Args:
        about: Where it was trained, JSON-ready; saved with it.

    Attributes:
        W_enc: ``[d_in, feature]``; ``W_dec`` ``[feature, d_out]``. Names are those of SAELens.

    Source: top-k arXiv 2406.04093, JumpReLU 2407.14435, gated 2404.16014, transcoders 2406.11944.

    Example:
        >>> autoencoder = SparseAutoencoder(AutoencoderConfig(d_in=2, n_features=2))
        >>> with torch.no_grad():
        ...     _ = autoencoder.W_enc.copy_(torch.eye(2)), autoencoder.W_dec.copy_(torch.eye(2))
        >>> autoencoder.encode(torch.tensor([3.0, -1.0])).tolist()
        [3.0, 0.0]
    """

    b_enc: nn.Parameter
    threshold: nn.Parameter
    b_gate: nn.Parameter
    b_mag: nn.Parameter
    r_mag: nn.Parameter

    @checked
    def __init__(
        self,
        config: AutoencoderConfig,
        *,
        seed: Seed = 0,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.config, self.about = config, dict(about or {})
        generator = torch.Generator().manual_seed(seed)
        d_out, n_features = self.d_out, config.n_features
        directions = torch.randn(n_features, d_out, generator=generator, dtype=torch.float32)
        self.W_dec = nn.Parameter(nn.functional.normalize(directions, dim=1))
        self.b_dec = nn.Parameter(torch.zeros(d_out, dtype=torch.float32))
        reading = self.W_dec.data
        if config.d_out is not None:
            reading = torch.randn(n_features, config.d_in, generator=generator, dtype=torch.float32)
            reading = nn.functional.normalize(reading, dim=1)
        self.W_enc = nn.Parameter(reading.T.clone().contiguous())
        vectors = {"relu": ("b_enc",), "topk": ("b_enc",), "jumprelu": ("b_enc", "threshold")}
        for name in vectors.get(config.activation, ("b_gate", "b_mag", "r_mag")):
            zeros = torch.zeros(n_features, dtype=torch.float32)
            self.register_parameter(name, nn.Parameter(zeros))
        if config.skip:
            zeros = torch.zeros(d_out, config.d_in, dtype=torch.float32)
            self.W_skip = nn.Parameter(zeros)

    @property
    def d_out(self) -> int:
        return self.config.d_in if self.config.d_out is None else self.config.d_out

    @property
    def is_transcoder(self) -> bool:
        return self.config.d_out is not None

    def encode(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch feature"]:
        """The activation of each feature, in the type of the weights."""
        config = self.config
        if x.shape[-1:] != (config.d_in,):
            fix = "Read the site that the autoencoder was trained on."
            expected = f"activations of width {config.d_in}"
            raise InputError("activation", expected=expected, given=describe_tensor(x), fix=fix)
        x = x.to(self.W_enc.dtype)
        if config.normalise != "none":
            shift, scale = self._moments(x)
            # SAELens divides by the deviation plus 1e-5, and multiplies by the deviation.
            x = (x - shift) / (scale + 1e-5 * (config.normalise == "layer_norm"))
        z = x - self.b_dec if config.subtract_bias and not self.is_transcoder else x
        if config.activation == "gated":
            size = (z @ (self.W_enc * self.r_mag.exp()) + self.b_mag).relu()
            return size * (z @ self.W_enc + self.b_gate > 0)
        pre = z @ self.W_enc + self.b_enc
        pre = pre * self.W_dec.norm(dim=-1) if config.scale_by_norm else pre
        if config.activation == "topk":
            assert config.k is not None
            values, places = pre.topk(config.k, dim=-1, sorted=False)
            return torch.zeros_like(pre).scatter(-1, places, values.relu())
        open_ = pre > self.threshold if config.activation == "jumprelu" else pre > 0
        return pre.relu() * open_

    def decode(
        self, features: Float[Tensor, "*batch feature"], x: Float[Tensor, "*batch d_in"]
    ) -> Float[Tensor, "*batch d_out"]:
        """The reconstruction from features of the activation ``x``.

        ``x`` gives the scale of a normalising autoencoder, and the input of a skip.
        """
        if self.config.scale_by_norm:
            features = features / self.W_dec.norm(dim=-1)
        reconstruction = features @ self.W_dec + self.b_dec
        if self.config.skip:
            return reconstruction + x.to(reconstruction.dtype) @ self.W_skip.T
        if self.config.normalise == "none":
            return reconstruction
        shift, scale = self._moments(x.to(reconstruction.dtype))
        return reconstruction * scale + shift

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """The reconstruction of an activation."""
        return self.decode(self.encode(x), x)

    def save(self, path: str | Path) -> Path:
        """Write one self-describing safetensors file, for :func:`load_autoencoder`."""
        header = {"config": self.config.to_dict(), "about": self.about}
        tensors = {name: x.detach().contiguous() for name, x in self.state_dict().items()}
        write_tensors(path, tensors, {_HEADER: json.dumps(header, default=json_default)})
        return Path(path)

    def extra_repr(self) -> str:
        return repr(self.config)

    def _moments(self, x: Tensor) -> tuple[Tensor | float, Tensor]:
        if self.config.normalise == "constant_norm_rescale":
            return 0.0, x.norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5
        return x.mean(-1, keepdim=True), x.std(-1, keepdim=True)


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
    config: Any
    if path.is_dir():
        cfg = read_json_object(path / "cfg.json")
        config, about = _of_sae_lens(path, cfg), cfg.get("metadata")
        weights = read_tensors(path / "sae_weights.safetensors")
    else:
        weights, texts = read_tensors_and_metadata(path)
        header = parse_json_object(texts.get(_HEADER, "")) or {}
        config, about = header.get("config"), header.get("about")
        if not isinstance(config, dict):
            expected, fix = "one that SparseAutoencoder.save wrote", "Pass that file, or a folder."
            raise CheckpointError(f"file {path}", expected=expected, given="another file", fix=fix)
    try:
        about = about if isinstance(about, dict) else {}
        autoencoder = SparseAutoencoder(AutoencoderConfig.from_dict(config), about=about)
        autoencoder.load_state_dict(weights, assign=True)
    except (ConfigError, RuntimeError) as error:
        what, expected = f"autoencoder {path}", "weights and settings that fit"
        got, fix = str(error).replace("\n", " "), "Save the autoencoder again."
        raise CheckpointError(what, expected=expected, given=got, fix=fix) from None
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


@checked
def train_autoencoder(
    activations: Float[Tensor, "row d_in"],
    *,
    n_features: PositiveInt,
    k: PositiveInt,
    steps: PositiveInt = 2000,
    batch_size: PositiveInt = 512,
    learning_rate: PositiveFloat = 2e-3,
    dead_after: PositiveInt = 100,
    about: Mapping[str, Any] | None = None,
    seed: Seed = 0,
) -> SparseAutoencoder:
    r"""Train a top-k autoencoder on rows of activations.

    Adam minimises :math:`\|x - \hat x\|^2`; decoder directions keep the norm 1. In the first three
    quarters, features that were silent for ``dead_after`` steps start again in the direction of a
    large error. The learning rate falls to 0 in the last fifth.

    Args:
        activations: Such as ``store.read_tensor(site)`` of one loop of an
            :class:`~loopinterp.models.ActivationStore`, or ``store.stack("state_post")`` with loops
            and rows flattened, for an autoencoder that all loops share.
        k: Features that are active at once.
        batch_size: Rows of a step, drawn at random.
        dead_after: Steps after which silent features start again.
        learning_rate: For activations scaled to a mean square of 1.
        about: Where the activations are from; saved with the autoencoder.

    Raises:
        InputError: If activations are no floats, too few, or all equal; or under
            ``torch.inference_mode()``.

    Source: top-k, arXiv 2406.04093, section 2.3; silent features, Bricken et al. (2023), Towards
    Monosemanticity, "Neuron resampling".

    Example:
        >>> signs = torch.eye(4)[torch.arange(256) % 4]  # four features, one active at a time
        >>> trained = train_autoencoder(signs, n_features=8, k=1, steps=300, learning_rate=0.01)
        >>> bool(((trained(signs) - signs) ** 2).mean() < 1e-3)
        True
    """
    rows = activations.detach()
    if rows.ndim != 2 or not rows.is_floating_point() or len(rows) < 2:
        expected, fix = "floats [row, d_in]", "Flatten loops, prompts and positions to rows."
        raise InputError("activations", expected=expected, given=describe_tensor(rows), fix=fix)
    generator = torch.Generator().manual_seed(seed)
    config = AutoencoderConfig(d_in=rows.shape[1], n_features=n_features, activation="topk", k=k)
    trained = SparseAutoencoder(config, seed=seed, about=about).to(rows.device)
    # Mean and scale of at most 65,536 rows.
    some = rows[torch.randint(len(rows), (min(len(rows), 2**16),), generator=generator)]
    mean = some.float().mean(0)
    scale = (some.float() - mean).square().mean().sqrt()
    if not 0 < float(scale) < float("inf"):
        expected, fix = "finite activations that differ", "Look at the site and its rows."
        raise InputError("activations", expected=expected, given="others", fix=fix)
    optimiser = torch.optim.Adam(trained.parameters(), lr=learning_rate, betas=(0.9, 0.999))
    decay = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, 5 * (steps - step) / steps)
    )
    silent = torch.ones(n_features, dtype=torch.bool, device=rows.device)
    for step in track(range(steps), "autoencoder"):
        drawn = torch.randint(len(rows), (min(batch_size, len(rows)),), generator=generator)
        x = (rows[drawn].to(mean) - mean) / scale
        with recording_gradients():
            features = trained.encode(x)
            error = x - trained.decode(features, x)
            loss = error.square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        decay.step()
        with torch.no_grad():
            trained.W_dec.div_(trained.W_dec.norm(dim=1, keepdim=True))
            silent &= ~(features > 0).any(0)
            if (step + 1) % dead_after == 0:
                if step < 0.75 * steps:
                    _revive(trained, optimiser, silent, error, generator)
                silent.fill_(True)
    with torch.no_grad():  # the scale of the activations goes into the biases
        trained.b_enc.mul_(scale)
        trained.b_dec.copy_(mean + scale * trained.b_dec)
    return trained


def _revive(
    trained: SparseAutoencoder,
    optimiser: torch.optim.Adam,
    silent: Bool[Tensor, " feature"],
    error: Float[Tensor, "row d_in"],
    generator: torch.Generator,
) -> None:
    """Give silent features the directions of large errors, and forget their gradients."""
    n_silent = int(silent.sum())
    if not n_silent:
        return
    chances = error.square().sum(1).cpu()
    rows = torch.multinomial(chances, n_silent, replacement=True, generator=generator)
    directions = torch.nn.functional.normalize(error[rows.to(error.device)], dim=1)
    for weight, place, value in (
        (trained.W_dec, (silent,), directions),
        (trained.W_enc, (slice(None), silent), directions.T),
        (trained.b_enc, (silent,), 0),
    ):
        weight[place] = value
        for moment in ("exp_avg", "exp_avg_sq"):
            optimiser.state[weight][moment][place] = 0
