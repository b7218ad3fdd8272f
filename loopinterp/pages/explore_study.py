"""The study behind the explorer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import PositiveInt

from loopinterp.core.boundary import checked
from loopinterp.core.errors import HookError, need
from loopinterp.core.results import study
from loopinterp.core.settings import Seed
from loopinterp.lenses.fitted_lens import FittedLens, layer_hooks, places
from loopinterp.lenses.lens_by_loop import PlaceReader
from loopinterp.lenses.lens_fits import check_lens, fitted_lens, loops_of_lens, of_other_weights
from loopinterp.models.iteration import bind
from loopinterp.models.protocol import describe_model, device_of, need_model
from loopinterp.models.study_examples import examples_for, inputs_and_loops
from loopinterp.pages.exploration import Exploration, Missing
from loopinterp.pages.explored_run import (
    Chosen,
    ExampleReason,
    ExploredRun,
    Pairs,
    assemble,
    program_values,
)
from loopinterp.programs.interpreter import constant_from
from loopinterp.programs.stock_programs import get_program
from loopinterp.tasks.sampling import as_batches
from loopinterp.tasks.task import IGNORE, Batch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.lenses.lens_fits import LensName
    from loopinterp.models import LoopedModel
    from loopinterp.programs.program import LoopProgram
    from loopinterp.tasks import Task


_MOST_WEIGHTS = 1_500_000
"""Most attention weights in a result; beyond that, only the largest of each pattern are kept."""


@torch.no_grad()
@checked
def explore(
    model: LoopedModel | Any,
    data: Batch | Task | Tensor | Sequence[Batch],
    *,
    programs: Sequence[str | LoopProgram] = (),
    examples: PositiveInt = 8,
    n_loops: int | None = None,
    words: Sequence[Any] | None = None,  # not str: some are looked up when they are asked for
    symbols: Sequence[Any] | None = None,
    asks: str = "",
    explain: Callable[[Batch], str] | None = None,
    plane: Float[Tensor, "axis d_model"] | None = None,
    lens: LensName | FittedLens = "coda",
    fit_on: Batch | Task | Tensor | None = None,
    ranks: PositiveInt = 3,
    n: int | Sequence[int] | None = None,
    batch_size: int | None = None,
    seed: Seed = 0,
) -> Exploration:
    """Choose interesting examples, and record what the model does on them at each loop.

    :class:`Exploration` lists what is recorded.

    Args:
        model: Without hooks no attention is shown.
        data: A batch, batches of one length each, a task, or inputs alone ``[batch, pos]``, which
            are shown in their order.
        programs: Programs that read the same tokens; the one that agrees most is shown first.
        examples: How many, in equal parts from each batch.
        n_loops: By default those after which each example is scored; required with inputs alone.
        words: Words of tokens, the task's by default; ``symbols``: of answer classes.
        asks: The task's question.
        explain: Maps a batch of one example to its solution by hand.
        plane: Two directions of the state; by default two principal components.
        lens: As in :func:`~loopinterp.lenses.lens_study`.
        fit_on: Data to fit the lens on.
        ranks: Answers of each reading.
        n: Length, or several, of a task's examples.

    Raises:
        InputError: If a batch has examples of several lengths, or the lens does not fit the model.

    Example:
        >>> from loopinterp.compiler import compile_program
        >>> from loopinterp.tasks import Addition
        >>> model = compile_program("ripple", max_length=6).model
        >>> found = explore(model, Addition(), programs=["ripple"], n=5, examples=2)
        >>> found.data.sizes["loop"], found.data["name"].values.tolist()
        (7, ['ripple.carry', "ripple's answer"])
        >>> bool((found.data["variable"] == found.data["implied"])[1, :, 1:, 1:].all())
        True
    """
    need_model(model)
    name, n_loops = check_lens(lens), loops_of_lens(lens, n_loops)
    batches = _batches(model, data, n_loops, {"n": n, "batch_size": batch_size, "seed": seed})
    chosen_programs = [get_program(p) for p in programs]
    drawn = sum(map(len, batches))
    described = describe_model(model)
    options = {"lens": name, "examples": examples, "drawn": drawn}
    with study(seed, model=described, **options) as watch:
        generator = torch.Generator().manual_seed(seed)
        runs: list[ExploredRun] = []
        for k, batch in enumerate(batches):
            share = (examples * (k + 1)) // len(batches) - (examples * k) // len(batches)
            if share := min(share, len(batch)):
                last = int(batch.n_loops[0]) if n_loops is None else n_loops
                by_task = not isinstance(data, torch.Tensor)
                rows = _choose(model, batch, last, share, chosen_programs, generator, by_task)
                places_of = torch.tensor([one.row for one in rows], device=batch.inputs.device)
                some = batch[places_of]
                how = {"n_loops": last, "inside": _has_inner(model), "seed": seed}
                maps = fitted_lens(lens, model, batch, fit_on=fit_on, **how)
                reader = PlaceReader(model, some.inputs, name, maps)
                states = reader.iteration.run(last)
                runs.append(ExploredRun(some, rows, reader, states, ranks=ranks, words=words))
        missing: dict[str, Any] = {}
        return assemble(
            watch,
            runs,
            directions=plane,
            variables=_variables(chosen_programs, runs, missing),
            patterns=_attention(model, runs, missing),
            inner=_inner(model, runs, missing),
            lens=name,
            of_other_weights=isinstance(lens, FittedLens) and of_other_weights(lens, described),
            symbols=symbols,
            asks=asks,
            by_hand=explain(runs[0].batch[:1].to("cpu")) if explain else "",
            missing=missing,
            n_examples=drawn,
        )


def _batches(
    model: Any, data: Any, n_loops: int | None, how_drawn: Mapping[str, Any]
) -> list[Batch]:
    """The data as batches of one length each, in the model's tokens."""
    if isinstance(data, torch.Tensor):
        inputs, n_loops = inputs_and_loops(model, data, n_loops)
        shape, every = inputs.shape[:2], torch.full((len(inputs),), n_loops, device=inputs.device)
        targets = torch.full(shape, IGNORE, device=inputs.device)
        batches = [Batch(inputs, targets, torch.full_like(every, shape[1]), every)]
    else:
        batches = as_batches(data, **how_drawn)
    batches = [examples_for(model, batch.to(device_of(model))) for batch in batches]
    fix = "Sample them with one n, and pass several batches as a list."
    for lengths in (batch.n_loops.unique().tolist() for batch in batches):
        got = f"examples that are asked for after {lengths} loops"
        need(len(lengths) == 1, "data", "examples of one length in each batch", got, fix)
    return batches


def _choose(
    model: Any,
    batch: Batch,
    n_loops: int,
    most: int,
    programs: Sequence[LoopProgram],
    generator: torch.Generator,
    by_task: bool,
) -> list[Chosen]:
    is_asked = batch.targets != IGNORE
    if not by_task or len(batch) == 1:
        return [Chosen(row, ExampleReason.AS_GIVEN) for row in range(most)]
    bound = bind(model, batch.inputs)
    answers = [bound.read(h, t).argmax(-1) for t, h in bound.run(n_loops)]
    right = torch.stack([(x == batch.targets) | ~is_asked for x in answers])  # [loop, example, pos]
    converged = {}
    for program in programs:
        outputs = program.trace(batch.inputs, n_loops=int(batch.n_loops[0])).outputs
        converged[program.name] = constant_from(torch.where(is_asked, outputs, 0)).amax(-1).cpu()
    return choose(right.cpu(), is_asked.cpu(), converged, most, generator)


def _has_inner(model: Any) -> bool:
    """Whether states inside a loop can be read."""
    return hasattr(model, "run_with_cache") and len(layer_hooks(model, 0, 1)) > 1


def _inner(model: Any, runs: list[ExploredRun], missing: dict[str, Any]) -> Pairs | None:
    if not _has_inner(model):
        return None
    if not all(run.reader.reads_layers for run in runs):
        missing[Missing.WHOLE_LOOP_LENS.name] = {}
        return None
    pairs = []
    for run in runs:
        best: dict[int, list[Tensor]] = {}
        for place in places(model, run.batch.inputs, run.n_loops, inside=True):
            if place.layer is not None:
                shares = run.reader.at(place).double().softmax(-1)
                best.setdefault(place.layer, []).append(torch.stack(shares.max(-1), -1))
        *layers, _ = best.values()  # the last one leaves the state itself
        # [layer, loop, example, pos, 2] to two arrays [example, loop, layer, pos]
        every = torch.stack([torch.stack(each) for each in layers])
        probability, answer = every.permute(4, 2, 1, 0, 3).cpu().numpy()
        before = [(0, 0), (1, 0), (0, 0), (0, 0)]  # at loop 0
        answer = np.pad(answer.astype(np.int32), before, constant_values=-1)
        pairs.append((answer, np.pad(probability, before, constant_values=np.nan)))
    return pairs


def _attention(model: Any, runs: list[ExploredRun], missing: dict[str, Any]) -> Pairs | None:
    if not (hasattr(model, "run_with_cache") and hasattr(model, "site")):
        missing[Missing.NO_HOOKS.name] = {"model": type(model).__name__}
        return None
    try:
        patterns = []
        for run in runs:
            # [example, loop, layer, head, query, key], one by one: a cache of all may be large.
            each = []
            for row in run.batch.inputs.split(1):
                name = "attn.hook_pattern"
                _, cache = model.run_with_cache(row, n_loops=run.n_loops, names_filter=name)
                each.append(cache.stack(name, layer=slice(None))[:, :, 0].float())
            patterns.append(torch.stack(each))
    except HookError as error:
        missing[Missing.UNREADABLE_PATTERNS.name] = {"error": error.given}
        return None
    # The most keys that any query looks at, and of how many patterns those weights are.
    seen = max(int((x > 0).sum(-1).max()) for x in patterns)
    heads = sum(x[..., 0].numel() for x in patterns)
    n_kept = max(1, min(seen, _MOST_WEIGHTS // heads))
    if n_kept < seen:
        missing[Missing.WEAK_ATTENTION.name] = {"kept": n_kept, "seen": seen}
    pairs = []
    for x in patterns:
        best = x.topk(min(n_kept, x.shape[-1]), dim=-1)
        fill = [(0, 0)] * 5 + [(0, n_kept - best.values.shape[-1])]
        none = [(0, 0), (1, 0), *fill[2:]]  # at loop 0
        narrow = np.uint8 if x.shape[-1] <= 256 else np.uint16
        keys = np.pad(best.indices.cpu().numpy().astype(narrow), none)
        pairs.append((keys, np.pad(best.values.cpu().numpy(), none)))
    return pairs


def _variables(
    programs: Sequence[LoopProgram], runs: list[ExploredRun], missing: dict[str, Any]
) -> dict[str, Pairs]:
    """Values and implied values [example, loop, pos] of each run, by variable name.

    Variables of the programs that agree most with the model come first; ties by simplicity.
    """
    if not programs:
        missing[Missing.NO_PROGRAM.name] = {}

    def distance(program: LoopProgram) -> tuple[float, int]:
        shares = []
        for run in runs:
            outputs = program.trace(run.batch.inputs.cpu(), n_loops=run.n_loops).outputs
            same = outputs.transpose(0, 1).numpy() == run.answer[..., 0]
            # Where something is asked, at every loop but the initial state.
            shares.append(same[:, 1:][np.broadcast_to(run.asked[:, None], same.shape)[:, 1:]])
        return 1 - float(np.concatenate(shares).mean()), len(program.variables)

    pairs: dict[str, Any] = {}
    for program in sorted(programs, key=distance):
        for run in runs:
            answers = torch.from_numpy(run.answer[..., 0]).transpose(0, 1)
            is_asked, inputs = torch.from_numpy(run.asked), run.batch.inputs.cpu()
            for name, *values in program_values(program, inputs, answers, is_asked):
                pair = tuple(x.transpose(0, 1).numpy() for x in values)
                pairs.setdefault(name, []).append(pair)
    return pairs


def choose(
    right: Bool[Tensor, "loop batch pos"],
    is_asked: Bool[Tensor, "batch pos"],
    converged: Mapping[str, Int[Tensor, " batch"]],
    most: int,
    generator: torch.Generator,
) -> list[Chosen]:
    """Choose examples that are wrong, late or long; the rest are drawn at random.

    Four kinds take turns: right once and wrong at the end; wrong at the end; right last;
    the longest chain of a program.

    Args:
        right: Of each answer after 0, 1, … loops; true where nothing is asked.
        converged: Loops after which each program's answer stays.

    Example:
        >>> asked = torch.ones(3, 1, dtype=torch.bool)
        >>> right = torch.tensor([[0, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()[..., None]
        >>> for one in choose(right, asked, {}, 3, torch.Generator().manual_seed(0)):
        ...     print(one.row, one.reason.name, dict(one.values))
        1 RELAPSED {'loop': 1, 'n': 1}
        2 LAST {'loop': 2}
        0 RANDOM {}
    """
    kinds = [_relapsed(right, is_asked), _wrong(right, is_asked), _late(right), _chains(converged)]
    chosen: dict[int, Chosen] = {}
    telling = max(3 * most // 4, 1)  # what is ordinary belongs to the picture
    while kinds and len(chosen) < telling:
        kind = kinds.pop(0)
        if fresh := next((one for one in kind if one.row not in chosen), None):
            chosen[fresh.row] = fresh
            kinds.append(kind)
    for row in torch.randperm(len(is_asked), generator=generator).tolist():
        if len(chosen) < most and row not in chosen:
            chosen[row] = Chosen(row, ExampleReason.RANDOM)
    return list(chosen.values())


def _wrong(right: Tensor, is_asked: Tensor) -> Iterator[Chosen]:
    """Examples wrong at the end, fewest wrong answers first."""
    wrong = (~right[-1]).sum(-1)
    for row in wrong.argsort(stable=True).tolist():
        if n := int(wrong[row]):
            yield Chosen(row, ExampleReason.WRONG, {"n": n, "asked": int(is_asked[row].sum())})


def _relapsed(right: Tensor, is_asked: Tensor) -> Iterator[Chosen]:
    """Examples that were right, or had answers right, and are wrong at the end."""
    # [loop, example] whether all is right; [example] how many answers were right once, not now.
    all_right, lost = right.all(-1), (~right[-1] & right.any(0)).sum(-1)
    for row in (all_right.any(0) & ~all_right[-1]).nonzero().flatten().tolist():
        loop, n = int(all_right[:, row].nonzero().max()), int((~right[-1, row]).sum())
        yield Chosen(row, ExampleReason.RELAPSED, {"loop": loop, "n": n})
    for row in lost.argsort(stable=True, descending=True).tolist():
        if (n := int(lost[row])) and not all_right[:, row].any():
            yield Chosen(row, ExampleReason.LOST, {"n": n, "asked": int(is_asked[row].sum())})


def _late(right: Tensor) -> Iterator[Chosen]:
    """Examples right at the end, the latest first."""
    all_right = right.all(-1)
    since = constant_from(all_right).where(all_right[-1], -1)  # -1: not right at the end
    for nth, row in enumerate(since.argsort(stable=True, descending=True).tolist()):
        loop = int(since[row])
        if loop < 1:
            return
        is_last = nth == 0 and int((since == loop).sum()) == 1
        yield Chosen(row, ExampleReason.LAST if is_last else ExampleReason.LATE, {"loop": loop})


def _chains(converged: Mapping[str, Tensor]) -> Iterator[Chosen]:
    """Examples that need most loops in the program whose loops vary most."""
    if not converged:
        return
    name, loops = max(converged.items(), key=lambda one: int(one[1].max() - one[1].min()))
    for row in loops.argsort(stable=True, descending=True).tolist():
        if (loop := int(loops[row])) <= int(loops.min()):
            return  # as many loops as the shortest one takes are no long chain
        yield Chosen(row, ExampleReason.LONG_CHAIN, {"program": name, "loop": loop})
