"""Looped transformers: configuration, protocol, hooked model, cache, stopping rules."""

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.models.iteration import iterate as iterate
    from loopinterp.models.iteration import states_at as states_at
    from loopinterp.models.looped_cache import LoopedCache as LoopedCache
    from loopinterp.models.looped_transformer import LoopedTransformer as LoopedTransformer
    from loopinterp.models.model_config import LoopedTransformerConfig as LoopedTransformerConfig
    from loopinterp.models.model_description import describe_model as describe_model
    from loopinterp.models.model_description import device_of as device_of
    from loopinterp.models.model_description import reach as reach
    from loopinterp.models.protocol import Iteration as Iteration
    from loopinterp.models.protocol import LoopedModel as LoopedModel
    from loopinterp.models.protocol import bind as bind
    from loopinterp.models.stopped_run import Stopped as Stopped
    from loopinterp.models.stopped_run import run_until as run_until
    from loopinterp.models.stopping_rules import Fixed as Fixed
    from loopinterp.models.stopping_rules import LoopView as LoopView
    from loopinterp.models.stopping_rules import MaxConfidence as MaxConfidence
    from loopinterp.models.stopping_rules import Oracle as Oracle
    from loopinterp.models.stopping_rules import ReadoutKL as ReadoutKL
    from loopinterp.models.stopping_rules import ResidualBelow as ResidualBelow
    from loopinterp.models.stopping_rules import StoppingRule as StoppingRule
    from loopinterp.models.transformer_lens_names import UnrolledModel as UnrolledModel

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Iteration": ".protocol",
        "LoopedCache": ".looped_cache",
        "LoopedModel": ".protocol",
        "LoopedTransformer": ".looped_transformer",
        "LoopedTransformerConfig": ".model_config",
        "UnrolledModel": ".transformer_lens_names",
        "Fixed": ".stopping_rules",
        "LoopView": ".stopping_rules",
        "MaxConfidence": ".stopping_rules",
        "Oracle": ".stopping_rules",
        "ReadoutKL": ".stopping_rules",
        "ResidualBelow": ".stopping_rules",
        "Stopped": ".stopped_run",
        "StoppingRule": ".stopping_rules",
        "bind": ".protocol",
        "describe_model": ".model_description",
        "device_of": ".model_description",
        "iterate": ".iteration",
        "reach": ".model_description",
        "run_until": ".stopped_run",
        "states_at": ".iteration",
    },
)
