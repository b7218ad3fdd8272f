"""What the models compute: token formats, seeded samplers, exact oracles, and T(n)."""

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.tasks import carries as carries
    from loopinterp.tasks.abacus_addition import AbacusAddition as AbacusAddition
    from loopinterp.tasks.addition import Addition as Addition
    from loopinterp.tasks.binary_sum import BinarySum as BinarySum
    from loopinterp.tasks.copy import Copy as Copy
    from loopinterp.tasks.full_output import FullOutput as FullOutput
    from loopinterp.tasks.multiplication import Multiplication as Multiplication
    from loopinterp.tasks.pairs import CarryPairs as CarryPairs
    from loopinterp.tasks.pairs import carry_pairs as carry_pairs
    from loopinterp.tasks.parity import Parity as Parity
    from loopinterp.tasks.prefix_sum import PrefixSum as PrefixSum
    from loopinterp.tasks.registry import get_task as get_task
    from loopinterp.tasks.registry import list_tasks as list_tasks
    from loopinterp.tasks.registry import register_task as register_task
    from loopinterp.tasks.task import IGNORE as IGNORE
    from loopinterp.tasks.task import Batch as Batch
    from loopinterp.tasks.task import Task as Task
    from loopinterp.tasks.token_addition import TokenAddition as TokenAddition
    from loopinterp.tasks.unique_set import UniqueSet as UniqueSet

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "AbacusAddition": ".abacus_addition",
        "Addition": ".addition",
        "Batch": ".task",
        "BinarySum": ".binary_sum",
        "CarryPairs": ".pairs",
        "Copy": ".copy",
        "FullOutput": ".full_output",
        "IGNORE": ".task",
        "Multiplication": ".multiplication",
        "Parity": ".parity",
        "PrefixSum": ".prefix_sum",
        "Task": ".task",
        "TokenAddition": ".token_addition",
        "UniqueSet": ".unique_set",
        "carries": ".carries",
        "carry_pairs": ".pairs",
        "get_task": ".registry",
        "list_tasks": ".registry",
        "register_task": ".registry",
    },
)
