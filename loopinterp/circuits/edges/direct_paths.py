"""Exact path patching: what goes from one component to another by no third one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.circuits.activation_patching_inputs import check_run, given_pairs
from loopinterp.circuits.edges.edge_run import Donor, EdgeRuns, component_at, need_graph
from loopinterp.circuits.edges.unrolled_graph import UnrolledGraph
from loopinterp.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from loopinterp.tasks.task import Batch


@torch.no_grad()
def path_patching(
    model: Any,
    base: Batch | Tensor,
    source: Batch | Tensor,
    *,
    senders: str | Sequence[str],
    receivers: str | Sequence[str],
    through: str | Sequence[str] = (),
    neurons: Mapping[str, Sequence[int]] | None = None,
    n_loops: int | None = None,
) -> Float[Tensor, "batch pos d_vocab_out"]:
    r"""Logits of the base's run, in which receivers see what senders write in the source's run.

    The path from a sender s to a receiver r is the residual stream alone, over as many loops as lie
    between them: what r reads is computed again with

    .. math:: \text{seen}_{s \to r} = s(\text{source})

    and everything else that r sees as it is in the base's run, through the norms (loop norm and
    post-norms too), the recall and the injections as they are. All others see of s what it writes
    in the base's run. What comes after r then runs on. With ``through``, these components see s
    too, are run again, and what they write is seen by receivers and one another, and by
    nobody else: all paths from s to r that lead through none or some of them. For the effect on
    the logits of a path that ends at r and goes on directly, let it go *through* r to ``readout``.

    Args:
        model: A ``LoopedTransformer``.
        base: A batch, or inputs alone: tokens ``[batch, pos]``, or features.
        source: As many inputs of the same length, pair by pair.
        senders: ``"input"`` (the embedding, wherever it is injected), heads, MLPs, or groups of
            neurons: ``"3:block.0.head.1"`` at loop 3, ``"block.0.mlp"`` at all loops,
            ``"coda.0.mlp"``, ``"block.0.carry"``.
        receivers: The same, and ``"readout"``; ``"3:block.0.head.1.q"`` is what queries see.
        through: Components between them.
        neurons: Groups of neurons by name, as :class:`UnrolledGraph` takes them.
        n_loops: Loops of the run; T(n) by default, to be given with inputs alone.

    Raises:
        InputError: Names that are not in the graph, receivers that no sender comes before, or
            components to go through that stand after a receiver; inputs that do not fit each
            other; a model with gates.

    Source: direct effects and path patching are those of arXiv 2211.00593 and 2304.05969, with
    loops unrolled.

    Example:
        >>> from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
        >>> config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=5, d_vocab_out=2)
        >>> base, source = torch.randint(5, (2, 8, 4), generator=torch.Generator().manual_seed(0))
        >>> path_patching(LoopedTransformer(config), base, source, n_loops=3,
        ...               senders="0:block.0.mlp", receivers="2:block.0.head.1.v").shape
        torch.Size([8, 4, 2])
    """
    base, source, n_loops, _ = given_pairs(model, base, source, n_loops, None)
    check_run(model, base, source, source, "resid_pre")
    need_graph(model)
    graph = UnrolledGraph(model.config, n_loops, neurons=neurons, split=True)
    first, last = graph.senders_named(senders), graph.receivers_named(receivers)
    between = graph.senders_named(through, "through") if through else []
    _check_order(graph, first, between, last)
    readers = {graph.senders[m].name for m in between}
    into = torch.zeros(len(graph.receivers), dtype=torch.bool)
    into[last] = True
    for r in range(len(graph.receivers)):
        into[r] |= component_at(graph, r).name in readers
    runs = EdgeRuns(model, graph, base)
    _, own = runs()
    _, donated = EdgeRuns(model, graph, source)()
    # Of the senders, the source's values go where they should; of what is between, the base's
    # go where its new ones should not.
    weights = torch.zeros(graph.edges.shape)
    weights[first] = into.float()
    weights[between] = (~into).float()
    values = own.clone()
    values[first] = donated[first]
    return runs(weights.to(values), Donor(values))[0]


def _check_order(
    graph: UnrolledGraph, first: list[int], between: list[int], last: list[int]
) -> None:
    stages = [component_at(graph, r).stage for r in last]
    if min(graph.senders[s].stage for s in first) >= max(stages):
        raise InputError(
            "receivers",
            expected=f"some that read after {graph.senders[first[0]].name} has written",
            given=graph.receiver_names[last[-1]],
            fix="Name receivers in a later layer or loop, or 'readout'.",
        )
    late = [m for m in between if graph.senders[m].stage >= min(stages)]
    both = [m for m in between if m in first]
    if late or both:
        raise InputError(
            "through",
            expected="components that stand before all receivers, and are no senders",
            given=graph.senders[(late or both)[0]].name,
            fix="Leave it out: what comes after a receiver runs on in any case.",
        )
