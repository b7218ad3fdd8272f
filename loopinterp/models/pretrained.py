"""Models on disk: a folder with ``config.json`` and ``model.safetensors``, and on a hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelHubMixin, snapshot_download

from loopinterp.errors import CheckpointError
from loopinterp.models.changed_layers import need_plain
from loopinterp.models.model_config import LoopedTransformerConfig
from loopinterp.models.model_description import own_weights
from loopinterp.models.run_inputs import check_dtype, refuse, spell
from loopinterp.results import config_hash
from loopinterp.storage import (
    read_json_object,
    read_tensors_and_metadata,
    refuse_pickle,
    write_json,
    write_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from typing_extensions import Self

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
HUB = "hf:"
"""Before the name of a model on a hub: a path with a typing mistake in it never asks one."""


class PretrainedMixin(ModelHubMixin):
    """``save_pretrained``, ``from_pretrained`` and ``push_to_hub`` without pickles."""

    config: LoopedTransformerConfig

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, *, push_to_hub: bool = False, **push_options: Any
    ) -> str | None:
        """Write the model to a folder; with ``push_to_hub=True``, also to a hub.

        Raises:
            InputError: If the folder cannot be written, there are options of a hub without it,
                or a layer has been changed so that the folder could not be read back.
        """
        if not push_to_hub:
            expected = "none without a push; neither a card nor another config is written"
            refuse(push_options, expected, "Leave it out, or pass push_to_hub=True.")
        self._save_pretrained(Path(save_directory))
        return self.push_to_hub(**push_options) if push_to_hub else None

    def _save_pretrained(self, save_directory: Path) -> None:
        write_model(self, save_directory)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str | None = None,
        **hub_options: Any,
    ) -> Self:
        """Read a model from a folder; or from a hub, which is asked for ``hf:owner/name`` only.

        Args:
            pretrained_model_name_or_path: A folder written by :meth:`save_pretrained`, or
                ``hf:owner/name`` for a model on a hub.
            device: Where to put it.
            dtype: Type to cast the weights to; as they are saved if None.
            hub_options: ``revision``, ``token``, ``cache_dir`` … of a download.

        Raises:
            InputError: If an option of a download is given with a folder.
            CheckpointError: If a file is missing, damaged, truncated, a pickle, or does not fit
                the configuration beside it.
        """
        kind, name = check_dtype(dtype), str(pretrained_model_name_or_path)
        folder = _folder(name, hub_options)
        if not (folder / WEIGHTS_FILE).exists():
            for other in sorted(folder.glob("*")):
                if other.suffix in {".pt", ".pth", ".bin", ".ckpt", ".pkl"} and other.is_file():
                    with other.open("rb") as file:
                        refuse_pickle(other, file.read(4))
        settings = read_json_object(folder / CONFIG_FILE)
        config = LoopedTransformerConfig.from_dict(settings)
        weights, about = read_tensors_and_metadata(folder / WEIGHTS_FILE)
        if about.get("config", config_hash(settings)) != config_hash(settings):
            raise CheckpointError(
                f"model {folder}",
                expected=f"the {CONFIG_FILE} that its weights were saved with",
                given="another one",
                fix="The files do not belong together: restore them, or save the model again.",
            )
        _check_size(config, folder)
        model = cls(config)  # type: ignore[call-arg]
        model._take_weights(weights, folder / WEIGHTS_FILE)
        return model.to(device=device, dtype=kind)  # type: ignore[attr-defined]

    def _take_weights(self, weights: dict[str, Tensor], path: Path) -> None:
        if self.config.tie_unembed and "embedding.weight" in weights:
            weights.setdefault("unembedding.weight", weights["embedding.weight"])
        dtypes = {x.dtype for x in weights.values()}
        if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
            raise CheckpointError(
                f"weights {path}",
                expected="weights of one floating-point type",
                given=", ".join(sorted(map(str, dtypes))),
                fix="Save the model again, in one precision.",
            )
        for dtype in dtypes:
            self.to(dtype)  # type: ignore[attr-defined]
        own = self.state_dict()  # type: ignore[attr-defined]
        check_tensors(weights, own, f"weights {path}", fix="Save the model again.")
        self.load_state_dict(weights)  # type: ignore[attr-defined]


def write_model(model: Any, folder: Path, texts: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write configuration and weights, with what else is to be known of the weights.

    Args:
        model: A model with a :class:`LoopedTransformerConfig`.
        folder: The folder.
        texts: Kept in the file of the weights, by name.

    Raises:
        InputError: If a layer has been changed, so that the folder could not be read back.
    """
    need_plain(model, "a model to be saved", saved=True)
    config = model.config.to_dict()
    about = {"config": config_hash(config), **texts}
    write_tensors(folder / WEIGHTS_FILE, own_weights(model), about)
    write_json(folder / CONFIG_FILE, config)


_SOON_MADE = 2**26
"""Models of so many weights are made in a moment, and then compared tensor by tensor."""


def _check_size(config: LoopedTransformerConfig, folder: Path) -> None:
    """Refuse a configuration of far more weights than there are bytes, before they are made."""
    path = folder / WEIGHTS_FILE
    n_bytes = path.stat().st_size if path.is_file() else 0
    if n_bytes and config.about_weights > max(n_bytes, _SOON_MADE):
        raise CheckpointError(
            f"weights {path}",
            expected=f"about {config.about_weights:,} weights, as the configuration beside it has",
            given=f"a file of {n_bytes:,} bytes",
            fix="The files do not belong together, or one is damaged: save the model again.",
        )


def _folder(name: str, options: dict[str, Any]) -> Path:
    """The folder of that name, or the one that a model of a hub is downloaded to."""
    if not name.startswith(HUB):
        if not os.path.isdir(name):  # which, unlike Path's, takes any name
            raise CheckpointError(
                f"model {name!r}",
                expected=f"a folder written by save_pretrained, or {HUB}owner/name on a hub",
                given="no such folder",
                fix=f"Check the path; to ask a hub, write {HUB} before the name.",
            )
        refuse(options, "none with a folder on this machine", "Leave it out.")
        return Path(name)
    repository = name.removeprefix(HUB)
    try:
        files = [CONFIG_FILE, WEIGHTS_FILE]
        return Path(snapshot_download(repository, allow_patterns=files, **options))
    except Exception as error:  # the hub raises many kinds; all mean that it cannot be had
        raise CheckpointError(
            f"model {name!r}",
            expected="a model on a hub",
            given=f"none that can be had ({type(error).__name__})",
            fix="Check the name, and the connection.",
        ) from error


def check_tensors(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str, *, fix: str
) -> None:
    """Raise unless the tensors of a file have the names, shapes and types of those they are for."""
    if faults := misfits(found, wanted, spell):
        raise CheckpointError(
            what,
            expected=f"the {len(wanted)} tensors of the configuration beside them",
            given=faults,
            fix=f"The files do not belong together. {fix}",
        )


def misfits(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], look: Callable[[Tensor], object]
) -> str:
    """What is missing, what is not known, and what looks otherwise, the first two of each."""
    faults = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())[:2]]
    faults += [f"{name} is not known" for name in sorted(found.keys() - wanted.keys())[:2]]
    both = {k: (look(found[k]), look(wanted[k])) for k in sorted(found.keys() & wanted.keys())}
    faults += [f"{name} is {a}, not {b}" for name, (a, b) in both.items() if a != b][:2]
    return "; ".join(faults)
