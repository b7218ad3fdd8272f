"""Find the adapter of a published model by what the model is."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from loopinterp.adapters.hrm import HRMAdapter
from loopinterp.adapters.hrm_text import HRMTextAdapter
from loopinterp.adapters.huginn import HuginnAdapter
from loopinterp.adapters.ouro import OuroAdapter
from loopinterp.adapters.tokenized_prompt import published_source, unreadable
from loopinterp.adapters.trm import TRMAdapter
from loopinterp.errors import InputError, unknown_name
from loopinterp.models.run_inputs import check_dtype

if TYPE_CHECKING:
    import torch
    from torch import nn

    from loopinterp.adapters.published_model import PublishedModel

ADAPTERS: tuple[type[PublishedModel], ...] = (
    OuroAdapter,
    HuginnAdapter,
    HRMTextAdapter,
    HRMAdapter,
    TRMAdapter,
)
"""All adapters, each of which says by its ``needs`` what models it is for."""


def load_published(
    name: str,
    *,
    trust_remote_code: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    **options: Any,
) -> PublishedModel:
    """Load a published model by its name, or from a folder, and adapt it.

    Weights are fetched of the name that is given, as ``transformers`` does it, and code beside them
    is run only where you say so. Weights have to be safetensors: no pickle is loaded.

    Args:
        name: A folder, or ``hf:owner/name`` on the Hugging Face hub.
        trust_remote_code: Run the model's own code, where ``transformers`` has none for it.
        device: Where to put it.
        dtype: Type of the weights; as they are saved if None.
        options: As :func:`adapt` takes them.

    Raises:
        InputError: If it cannot be loaded, or no adapter knows such a model.
    """
    from transformers import AutoModelForCausalLM

    source, kind = published_source(name), check_dtype(dtype) or "auto"
    how: dict[str, Any] = {"trust_remote_code": trust_remote_code, "dtype": kind}
    how["use_safetensors"] = True  # a pickle can run any code when it is loaded
    model: Any
    try:
        model = AutoModelForCausalLM.from_pretrained(source, **how)
    except MemoryError:
        raise
    except Exception as error:  # whatever a damaged or missing file makes of transformers' code
        raise unreadable("model", name, error) from error
    return adapt(model.to(device).eval(), **options)


def adapt(model: nn.Module, **options: Any) -> PublishedModel:
    """A published looped model with our addresses, hooks and protocol, so that any study runs.

    The weights are shared with the model, and nothing of it is changed.

    Args:
        model: A model as the published code makes it, such as what
            ``transformers.AutoModelForCausalLM.from_pretrained`` gives.
        options: What its adapter takes, such as ``seed=`` for a random start.

    Raises:
        InputError: If no adapter knows such a model, or its adapter no such option.
    """
    for adapter in ADAPTERS:
        if adapter.fits(model):
            named = signature(adapter).parameters.values()
            known = [option.name for option in named if option.kind is Parameter.KEYWORD_ONLY]
            for name in options.keys() - {*known}:
                raise unknown_name(f"option of {adapter.__name__}", name, known)
            return adapter(model, **options)  # type: ignore[call-arg]
    kinds = ", ".join(adapter.__name__.removesuffix("Adapter") for adapter in ADAPTERS)
    raise InputError(
        "model",
        expected=f"a published looped model of a kind that has an adapter: {kinds}",
        given=f"a {type(model).__name__}",
        fix="Wrap it in the four methods of LoopedModel for studies of its states, or derive an "
        "adapter from loopinterp.adapters.PublishedModel.",
    )
