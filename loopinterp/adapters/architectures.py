"""Adapted models by configuration: an architecture, its sizes, and weights from a file."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from pydantic import PositiveInt

from loopinterp.core.boundary import checked, resolve_device
from loopinterp.core.errors import CheckpointError, ConfigError, InputError, unknown_name
from loopinterp.core.results import config_hash
from loopinterp.core.settings import Settings, settings
from loopinterp.core.storage import read_json_object, read_tensors_and_metadata
from loopinterp.models.weights import seeded

if TYPE_CHECKING:
    from torch import nn

    from loopinterp.adapters.published_model import PublishedModel


class _Code(NamedTuple):
    module: str
    config: str
    model: str
    adapter: str
    head: bool = True  # whether it has an lm_head, whose classes can be narrowed
    causal: bool = False

    def imported(self, name: str) -> Any:
        return getattr(import_module(self.module), name)


_PLAIN = "loopinterp.adapters.plain"
_PUZZLES = f"{_PLAIN}.hrm"
_LANGUAGE = f"{_PLAIN}.language_models"
_CODE: dict[str, _Code] = {
    "albert": _Code(
        "transformers", "AlbertConfig", "AlbertForMaskedLM", "AlbertAdapter", head=False
    ),
    "hrm": _Code(_PUZZLES, "HRMConfig", "HierarchicalReasoningModel_ACTV1", "HRMAdapter"),
    "huginn": _Code(_LANGUAGE, "RavenConfig", "RavenForCausalLM", "HuginnAdapter", causal=True),
    "ouro": _Code(_LANGUAGE, "OuroConfig", "OuroForCausalLM", "OuroAdapter", causal=True),
    "trm": _Code(_PUZZLES, "TRMConfig", "TinyRecursiveReasoningModel_ACTV1", "TRMAdapter"),
}
# Entries of a configuration of transformers that decide no computation.
_NOT_SIZES = ("architectures", "dtype", "model_type", "transformers_version")


@settings
class AdaptedModelConfig(Settings):
    """The description from which an adapted model is rebuilt, beside its weights.

    Attributes:
        architecture: ``ouro``, ``huginn``, ``hrm`` and ``trm`` are in
            :mod:`loopinterp.adapters.plain`, ``albert`` in ``transformers``.
        sizes: Arguments of the published configuration, with ``vocab_size``.
        n_outputs: Classes of the head, the first of its tokens; all if None.
        options: Options of :func:`~loopinterp.adapters.adapt`.

    Example:
        >>> config = AdaptedModelConfig(architecture="ouro", sizes={"vocab_size": 13}, n_outputs=5)
        >>> config.build().config.d_vocab_out
        5
    """

    architecture: Literal["albert", "hrm", "huginn", "ouro", "trm"]
    sizes: dict[str, Any]
    n_outputs: PositiveInt | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        code, fix = _CODE[self.architecture], "Add it."
        if not isinstance(self.sizes.get("vocab_size"), int):
            got = repr(self.sizes.get("vocab_size"))
            raise ConfigError("sizes.vocab_size", expected="an integer", given=got, fix=fix)
        if self.n_outputs is not None and not code.head:
            expected, fix = f"none with {self.architecture}", "Leave it out."
            got = str(self.n_outputs)
            raise ConfigError("n_outputs", expected=expected, given=got, fix=fix)

    @property
    def d_vocab(self) -> int:
        return self.sizes["vocab_size"]

    @property
    def d_features(self) -> None:
        return None

    @property
    def d_vocab_out(self) -> int:
        return self.n_outputs or self.d_vocab

    @property
    def causal(self) -> bool:
        return _CODE[self.architecture].causal

    @classmethod
    def of(cls, model: PublishedModel) -> AdaptedModelConfig:
        """The configuration of an adapted model.

        Raises:
            InputError: If its module is of other code than the architectures.
        """
        published: Any = model.published
        package = type(published).__module__.split(".")[0]
        kind = package, type(published).__name__, type(model).__name__
        for name, code in _CODE.items():
            # Other code with the same names may compute something else.
            if kind != (code.module.split(".")[0], code.model, code.adapter):
                continue
            config = published.config
            if code.module.startswith(_PLAIN):
                sizes = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
            else:
                sizes = {k: x for k, x in config.to_diff_dict().items() if k not in _NOT_SIZES}
            known, answers = sizes["vocab_size"], model.config.d_vocab_out
            return cls(
                architecture=name,  # type: ignore[arg-type]
                sizes=sizes,
                n_outputs=None if answers == known else answers,
                options=dict(model.config.options),
            )
        raise InputError(
            "model",
            expected=f"an adapted model of an architecture that can be rebuilt: {', '.join(_CODE)}",
            given=f"a {type(published).__name__} of {type(published).__module__}",
            fix="Give it to loopinterp.analyze_model, which leaves it in memory.",
        )

    @checked
    def build(self, *, seed: int = 0) -> PublishedModel:
        """A model of random weights, in evaluation mode.

        Raises:
            ConfigError: If a size is unknown.
        """
        from loopinterp.adapters.adapt import adapt

        code = _CODE[self.architecture]
        if code.module.startswith(_PLAIN):
            known = [f.name for f in dataclasses.fields(code.imported(code.config))]
            for name in self.sizes.keys() - {*known}:
                raise unknown_name("sizes", name, known, error=ConfigError)
        with seeded(seed):
            # HRM and TRM take their settings as a mapping.
            of_mapping = self.architecture in ("hrm", "trm")
            config = dict(self.sizes) if of_mapping else code.imported(code.config)(**self.sizes)
            published = code.imported(code.model)(config).eval()
        if self.n_outputs is not None:
            keep_outputs(published, self.n_outputs)
        return adapt(published, **self.options)


@checked
def keep_outputs(published: nn.Module, n_outputs: PositiveInt) -> None:
    """Keep the first classes of a language model's head, in place.

    A task's targets are often the first of its tokens. A head tied to the embedding becomes untied.

    Raises:
        InputError: If there is no head of so many classes.
    """
    head: Any = getattr(getattr(published, "inner", published), "lm_head", None)
    n_classes = 0 if head is None else len(head.weight)
    if head is None or n_outputs > n_classes:
        expected = f"a head of {n_outputs} classes or more"
        got = "none" if head is None else str(n_classes)
        fix = "Pass a model with lm_head, and its number of classes at most."
        raise InputError("published", expected=expected, given=got, fix=fix)
    head.weight = torch.nn.Parameter(head.weight.detach()[:n_outputs].clone())
    if head.bias is not None:
        head.bias = torch.nn.Parameter(head.bias.detach()[:n_outputs].clone())
    if hasattr(head, "out_features"):
        head.out_features = n_outputs


def read_adapted(folder: Path, *, device: torch.device | str = "cpu") -> PublishedModel:
    """An adapted model from ``config.json`` and ``model.safetensors``, in evaluation mode.

    Raises:
        CheckpointError: If a file is damaged, or the two do not fit.
    """
    from loopinterp.models.checkpoints import check_tensors
    from loopinterp.models.protocol import every_tensor

    device, path = resolve_device(device), folder / "model.safetensors"
    values = read_json_object(folder / "config.json")
    weights, about = read_tensors_and_metadata(path)
    if about.get("config") != config_hash(values):
        expected = "the config.json that its weights were saved with"
        fix = "The files do not belong together: restore them, or save the model again."
        raise CheckpointError(f"model {folder}", expected=expected, given="another", fix=fix)
    model = AdaptedModelConfig.from_dict(values).build()
    tensors = every_tensor(model)
    check_tensors(weights, tensors, f"weights {path}", fix="Save the model again.")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(weights[name])
    return model.to(device)
