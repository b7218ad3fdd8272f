"""Training: objectives, curriculum, averaged weights, runs that survive a kill, evaluation."""

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.training.config import CurriculumConfig as CurriculumConfig
    from loopinterp.training.config import ObjectiveConfig as ObjectiveConfig
    from loopinterp.training.config import OptimiserConfig as OptimiserConfig
    from loopinterp.training.config import TrainingConfig as TrainingConfig
    from loopinterp.training.evaluation import EvaluationResult as EvaluationResult
    from loopinterp.training.evaluation import evaluate as evaluate
    from loopinterp.training.fitting import train as train
    from loopinterp.training.overrides import apply_settings as apply_settings
    from loopinterp.training.recipes import RECIPES as RECIPES
    from loopinterp.training.run import Run as Run
    from loopinterp.training.trainer import Trainer as Trainer

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "CurriculumConfig": ".config",
        "EvaluationResult": ".evaluation",
        "ObjectiveConfig": ".config",
        "OptimiserConfig": ".config",
        "RECIPES": ".recipes",
        "Run": ".run",
        "Trainer": ".trainer",
        "TrainingConfig": ".config",
        "apply_settings": ".overrides",
        "evaluate": ".evaluation",
        "train": ".fitting",
    },
)
