"""Looped transformers: configuration, protocol, hooked model, cache, stopping rules."""

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.models.cache import LoopedCache as LoopedCache
    from loopinterp.models.config import LoopedTransformerConfig as LoopedTransformerConfig
    from loopinterp.models.iteration import iterate as iterate
    from loopinterp.models.iteration import states_at as states_at
    from loopinterp.models.looped_transformer import LoopedTransformer as LoopedTransformer
    from loopinterp.models.model_description import describe_model as describe_model
    from loopinterp.models.model_description import device_of as device_of
    from loopinterp.models.model_description import reach as reach
    from loopinterp.models.protocol import Iteration as Iteration
    from loopinterp.models.protocol import LoopedModel as LoopedModel
    from loopinterp.models.protocol import bind as bind
    from loopinterp.models.stopping import Fixed as Fixed
    from loopinterp.models.stopping import LoopView as LoopView
    from loopinterp.models.stopping import MaxConfidence as MaxConfidence
    from loopinterp.models.stopping import Oracle as Oracle
    from loopinterp.models.stopping import ReadoutKL as ReadoutKL
    from loopinterp.models.stopping import ResidualBelow as ResidualBelow
    from loopinterp.models.stopping import StoppingRule as StoppingRule
    from loopinterp.models.transformer_lens import UnrolledModel as UnrolledModel
    from loopinterp.models.until import Stopped as Stopped
    from loopinterp.models.until import run_until as run_until

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Iteration": ".protocol",
        "LoopedCache": ".cache",
        "LoopedModel": ".protocol",
        "LoopedTransformer": ".looped_transformer",
        "LoopedTransformerConfig": ".config",
        "UnrolledModel": ".transformer_lens",
        "Fixed": ".stopping",
        "LoopView": ".stopping",
        "MaxConfidence": ".stopping",
        "Oracle": ".stopping",
        "ReadoutKL": ".stopping",
        "ResidualBelow": ".stopping",
        "Stopped": ".until",
        "StoppingRule": ".stopping",
        "bind": ".protocol",
        "describe_model": ".model_description",
        "device_of": ".model_description",
        "iterate": ".iteration",
        "reach": ".model_description",
        "run_until": ".until",
        "states_at": ".iteration",
    },
)
