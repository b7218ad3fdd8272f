"""Evaluation by length and by operands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loopinterp.app import stopping_rules
from loopinterp.core.results import load_result
from loopinterp.models import (
    STOPPING_RULES,
    Fixed,
    LoopedTransformer,
    LoopedTransformerConfig,
    LoopRule,
    ResidualBelow,
    generate,
)
from loopinterp.tasks import (
    IGNORE,
    AbacusAddition,
    Addition,
    Multiplication,
    NextToken,
    Parity,
    get_task,
)
from loopinterp.tasks.task import Batch
from loopinterp.training import (
    CurriculumConfig,
    EvaluationResult,
    ObjectiveConfig,
    OptimiserConfig,
    Trainer,
    TrainingConfig,
    evaluate,
    operand_grid,
)
from loopinterp.training.answer_scores import Lowest, _right_by_example, lowest_of, scores_at
from loopinterp.training.device import stream
from loopinterp.training.evaluation import ANY, BEST, ORACLE
from tests.refusals import naming
from tests.training.tiny_run import TINY


class LateParity:
    """Parity whose other positions move for six loops, and which answers one loop later."""

    end = Parity().d_vocab_out - 1

    def embed(self, inputs: Tensor) -> Tensor:
        answers = torch.full(inputs.shape, self.end)
        answers[:, -2] = (inputs == 1).sum(1) % 2
        return answers[..., None].float()

    def initial_state(self, e: Tensor) -> Tensor:
        h = torch.ones(*e.shape[:2], 2)  # [batch, pos, (loops, answer)]
        h[..., 1] = self.end
        return h

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        loops, answer = h.unbind(-1)
        moved = F.pad((loops[:, :-2] + 1).clamp(max=7), (0, 2), value=1.0)
        return torch.stack([moved, torch.where(loops[:, :1] == 7, e[..., 0], answer)], -1)

    def readout(self, h: Tensor) -> Tensor:
        return F.one_hot(h[..., 1].long(), 3).float()


class Ripple:
    """Adds by carrying one position per loop: exactly right from T(n) - 1 loops on.

    The state is (carry out of each position); the readout needs the input and finds it there.
    """

    def embed(self, inputs: Tensor) -> Tensor:
        a, b = Addition().operands(inputs)
        return torch.stack([a, b], -1).float()

    def initial_state(self, e: Tensor) -> Tensor:
        a, b = e.unbind(-1)
        return torch.stack([a, b, torch.zeros_like(a)], -1)

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        a, b, carry = h.unbind(-1)
        before = F.pad(carry, (1, -1))
        return torch.stack([a, b, ((a + b + before) >= 2).float()], -1)

    def readout(self, h: Tensor) -> Tensor:
        a, b, carry = h.unbind(-1)
        bit = (a + b + F.pad(carry, (1, -1))) % 2
        return torch.stack([1 - bit, bit], -1)


class Constant(Ripple):
    """Answers 0 everywhere."""

    def readout(self, h: Tensor) -> Tensor:
        return torch.tensor([1.0, 0.0]).expand(*h.shape[:2], 2)


def test_a_right_program_is_right_everywhere() -> None:
    result = evaluate(Ripple(), Addition(), [3, 9, 17], n_samples=40, trained_up_to=3)
    assert result.data["distribution"].values.tolist() == list(Addition.distributions)
    for name in ("exact_match", "bit_accuracy"):
        assert (result.data[name].sel(estimate=["value", "high"]) == 1).all()
        assert (result.data[name].sel(estimate="low") < 1).all()


def test_too_few_loops_leave_chains_unfinished() -> None:
    result = evaluate(Ripple(), Addition(), [8], n_samples=20, extra_loops=[-9, -4, 0, 6])
    assert result.data["extra_loop"].values.tolist() == [-9, -4, 0, 6]
    chain = result.data.sel(distribution="chain", length=8, estimate="value")
    # n - 1 loops carry through the chain; T(n) = n + 1, so 4 fewer leave bits 6 and 7 open.
    assert chain["exact_match"].values.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert chain["bit_accuracy"].values.tolist() == [1 / 8, 6 / 8, 1.0, 1.0]


def test_the_constant_answer_is_the_control() -> None:
    result = evaluate(Constant(), Addition(), [6], n_samples=300)
    # All sum bits of a full chain are 0: a constant is right there, and nowhere else.
    cells = result.data.sel(length=6, extra_loop=0, estimate="value")
    chain = cells.sel(distribution="chain")
    assert chain["exact_match"] == chain["constant_exact_match"] == 1.0
    uniform = cells.sel(distribution="uniform")
    assert uniform["constant_exact_match"] < 0.1
    assert uniform["exact_match"] <= uniform["constant_exact_match"]
    assert 0.4 < uniform["bit_accuracy"] <= uniform["constant_bit_accuracy"] < 0.6


def test_a_guess_that_closes_its_answer_is_no_better_than_the_control() -> None:
    """Half of all parities are 0, and after each comes EOS: no class is right at both places."""

    class Guess(Ripple):
        def embed(self, inputs: Tensor) -> Tensor:
            return F.one_hot(inputs, 5).float()

        def initial_state(self, e: Tensor) -> Tensor:
            return e

        def step(self, h: Tensor, e: Tensor) -> Tensor:
            return h.clone()

        def readout(self, h: Tensor) -> Tensor:
            return torch.stack([h[..., 2], 0 * h[..., 2], 1 - h[..., 2]], -1)  # 2 is "="

    cells = evaluate(Guess(), Parity(), [6, 20]).data.sel(extra_loop=0, estimate="value")
    assert (cells["exact_match"] > 0.4).all()
    assert (cells["exact_match"] <= cells["constant_exact_match"]).all()
    assert (cells["bit_accuracy"] <= cells["constant_bit_accuracy"]).all()


def test_scores_are_those_of_the_plain_model(tiny: TrainingConfig) -> None:
    model, task = LoopedTransformer(tiny.model), Addition()
    result = evaluate(model, task, [4], n_samples=50, distributions=["uniform"], seed=3)
    again = evaluate(model, task, [4], n_samples=50, distributions=["uniform"], seed=3)
    assert result.data.identical(again.data)
    from loopinterp.training.device import stream

    batch = task.sample(
        4, batch_size=50, generator=stream(3, "evaluation uniform 4"), distribution="uniform"
    )
    answer = model(batch.inputs, n_loops=5).argmax(-1)[:, 1:]
    right = answer == batch.targets[:, 1:]
    cell = result.data.sel(length=4, distribution="uniform", extra_loop=0, estimate="value")
    assert float(cell["exact_match"]) == pytest.approx(right.all(1).double().mean().item())
    assert float(cell["bit_accuracy"]) == pytest.approx(right.double().mean().item())


def test_every_example_is_read_after_its_own_loops() -> None:
    """In one batch some have 2 loops and some 5, and the model is right then, and at no other."""

    class Mixed(Addition):
        def sample(self, *args, **options) -> Batch:
            batch = super().sample(*args, **options)
            return replace(batch, n_loops=own(batch.inputs))

    class Blink(Ripple):
        def embed(self, inputs: Tensor) -> Tensor:
            right = Addition().targets(inputs).clamp(min=0)
            return torch.stack([right, own(inputs)[:, None].expand_as(right)], -1).float()

        def initial_state(self, e: Tensor) -> Tensor:
            return e.clone()

        def step(self, h: Tensor, e: Tensor) -> Tensor:
            return h - torch.tensor([0.0, 1.0])

        def readout(self, h: Tensor) -> Tensor:
            bit = torch.where(h[..., 1] == 0, h[..., 0], 1 - h[..., 0])
            return torch.stack([1 - bit, bit], -1)

    def own(inputs: Tensor) -> Tensor:
        return 2 + 3 * (inputs[:, 1] % 2)

    options = {"distributions": ["uniform"], "n_samples": 40, "extra_loops": [-2, 0, 3]}
    for seed in range(4):  # whatever the first example is
        result = evaluate(Blink(), Mixed(), [4], seed=seed, **options)  # type: ignore[arg-type]
        exact = result.data["exact_match"].sel(estimate="value", length=4, distribution="uniform")
        assert exact.values.tolist() == [0, 1, 0]
    with naming("extra_loops"):
        evaluate(Blink(), Mixed(), [4], **options | {"extra_loops": [-3]})  # type: ignore[arg-type]


def test_a_model_of_its_own_depth_is_asked_after_that(tmp_path: Path) -> None:
    """As an ordinary transformer, which T(n) loops make nonsense of."""

    class Once(Ripple):
        """Right after one loop, and never again."""

        loop_rule = LoopRule(1)

        def embed(self, inputs: Tensor) -> Tensor:
            a, b = Addition().operands(inputs)
            carry, carries = torch.zeros_like(a[:, 0]), []
            for x, y in zip(a.T, b.T):
                carry = ((x + y + carry) >= 2).to(carry)
                carries.append(carry)
            return torch.stack([a, b, torch.stack(carries, 1)], -1).float()

        def initial_state(self, e: Tensor) -> Tensor:
            return e * 0

        def step(self, h: Tensor, e: Tensor) -> Tensor:
            return torch.where((h == 0).flatten(1).all(1)[:, None, None], e, e * 0 + 0.01)

    rules = {"settled": ResidualBelow(0.01)}
    result = evaluate(Once(), Addition(), [3, 8], n_samples=50, extra_loops=[0, 1], stopping=rules)
    assert result.depth == 1
    right = result.data.sel(extra_loop=0, estimate="value")["exact_match"]
    assert (right == 1).all()
    late = result.data.sel(extra_loop=1, distribution="uniform", estimate="value")["exact_match"]
    assert (late < 0.5).all()
    assert (result.data["stopped_at"].sel(rule=ORACLE) == 1).all()
    caption = result.figures()[0].caption
    assert "after 1 loop;" in caption and "T(n)" not in caption
    assert EvaluationResult.load(result.save(tmp_path)).depth == 1
    with naming("extra_loops"):
        evaluate(Once(), Addition(), [3], n_samples=2, extra_loops=[-2])


def test_ignored_positions_are_not_scored() -> None:
    targets = torch.tensor([[IGNORE, 1, 0], [IGNORE, 1, IGNORE]])
    answer = torch.tensor([[0, 1, 1], [0, 1, 1]])
    exact, share = _right_by_example(answer, targets)
    assert exact.tolist() == [False, True] and share.tolist() == [0.5, 1.0]


class WrongOnOneBit:
    """Multiplies, and answers a product with a one-bit factor with its end token alone."""

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        answers = Multiplication().targets(tokens).clamp(min=0)
        one_bit = tokens[:, 2] == 2  # BOS a *
        return torch.where(one_bit[:, None], 2, answers)[..., None].double()

    def initial_state(self, e: torch.Tensor) -> torch.Tensor:
        return e

    def step(self, h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        return e

    def readout(self, h: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(h[..., 0].long(), 3).double()


def test_a_task_is_worth_what_its_lowest_distribution_is() -> None:
    """Random factors have two bits; the published training data have one in half of them."""
    result = evaluate(WrongOnOneBit(), Multiplication(), [3, 8], n_samples=200)
    exact = result.data["exact_match"].sel(estimate="value", extra_loop=0)
    assert (exact.sel(distribution=["uniform", "biased"]) == 1).all()
    for n in (3, 8):
        lowest = result.lowest(n)
        assert lowest.distributions == ("mixed",) and 0.35 < lowest.share < 0.65
    first = result.findings()[0]
    assert first.good is False and first.value == f"{min(exact.values.ravel()):.2f} exact match"
    some = evaluate(WrongOnOneBit(), Multiplication(), [3], distributions=["uniform"], n_samples=9)
    assert some.not_judged == ["biased", "mixed"]
    # Nothing is said of a part of the task alone.
    assert some.findings()[0].good is None


def test_where_distributions_tie_all_are_named() -> None:
    shares = {"uniform": 0.25, "biased": 0.5, "mixed": 0.25}
    assert lowest_of(shares) == Lowest(0.25, ("uniform", "mixed"))


def test_a_result_goes_to_disk_and_back(tmp_path: Path) -> None:
    result = evaluate(Ripple(), Addition(), [2, 5], n_samples=10, extra_loops=[0, 1])
    loaded = load_result(result.save(tmp_path))
    assert isinstance(loaded, EvaluationResult)
    assert loaded.data.identical(result.data)
    frame = result.to_dataframe("exact_match")
    assert len(frame) == 2 * 3 * 2
    assert {"extra_loop", "distribution", "length", "exact_match"} <= set(frame.columns)


def test_provenance_names_model_and_task(tiny: TrainingConfig) -> None:
    result = evaluate(LoopedTransformer(tiny.model), Addition(), [2], n_samples=2)
    assert result.provenance.config["task"] == {"name": "addition", "format": "pairs"}
    assert result.provenance.config["model"]["d_model"] == 8


@pytest.mark.parametrize(
    ("changes", "what", "given", "help"),
    [
        ({"lengths": []}, "lengths", "none", "lengths="),
        ({"distributions": []}, "distributions", "none", "distributions="),
        ({"extra_loops": []}, "extra_loops", "none", "extra_loops="),
        ({"n_samples": 0}, "n_samples", "0", ">= 1"),
        ({"distributions": ["uniforms"]}, "distribution of .*", "'uniforms'", "'uniform'?"),
        ({"extra_loops": [-5]}, "extra_loops", "-5", "-4"),
        ({"lengths": [0]}, "n", "0", ">= 1"),
        ({"trained_up_to": 0}, "trained_up_to", "0", ">= 1"),
        ({"stopping": {"one": Fixed(1)}, "max_loops": 3}, "max_loops", "3", "least 4"),
        ({"stopping": {ORACLE: Fixed(1)}}, "stopping", "one", repr(ORACLE)),
        ({"max_loops": 9}, "max_loops, .*", "others", "stopping="),
        ({"stopping_reads": "state"}, "max_loops, .*", "others", "stopping="),
    ],
)
def test_wrong_arguments_are_explained(
    changes: dict[str, object], what: str, given: str, help: str
) -> None:
    arguments: dict[str, object] = {"lengths": [3], "n_samples": 4, **changes}
    with naming(what) as caught:
        evaluate(Ripple(), Addition(), **arguments)  # type: ignore[arg-type]
    error = caught.value
    assert error.given == given and help in f"{error.expected} {error.fix}"


def test_a_distribution_that_is_named_twice_is_asked_once() -> None:
    result = evaluate(Ripple(), Addition(), [3], distributions=["chain", "chain"], n_samples=4)
    assert result.data["distribution"].values.tolist() == ["chain"]


def test_stopping_rules_stand_beside_the_oracle() -> None:
    rules = {"one loop": Fixed(1), "settled": ResidualBelow(1e-3)}
    options = {"distributions": ["chain"], "stopping": rules, "max_loops": 12}
    result = evaluate(Ripple(), Addition(), [4, 8], n_samples=10, **options)  # type: ignore[arg-type]
    cells = result.data.sel(distribution="chain")
    exact = cells["stopped_exact_match"].sel(estimate="value")
    assert exact.sel(rule=ORACLE).values.tolist() == [1.0, 1.0]
    assert exact.sel(rule="one loop").values.tolist() == [0.0, 0.0]
    assert exact.sel(rule="settled").values.tolist() == [1.0, 1.0]
    assert cells["stopped_at"].sel(rule=ORACLE).values.tolist() == [5, 9]
    assert cells["stopped_at"].sel(rule="one loop").values.tolist() == [1, 1]
    # The last carry is made in loop n; one loop later nothing moves, and the rule stops.
    assert cells["stopped_at"].sel(rule="settled").values.tolist() == [5, 9]
    # In hindsight n loops carry through the chain for all, and for each.
    for name in (BEST, ANY):
        assert exact.sel(rule=name).values.tolist() == [1.0, 1.0]
        assert cells["stopped_at"].sel(rule=name).values.tolist() == [3, 7]
    assert result.findings()[-1].value == "1.00"
    by_rule, on_curve = result.figures()[-2:]
    assert by_rule.data is not None and len(by_rule.data) == 10
    assert on_curve.data is not None and len(on_curve.data) == 10


def test_hindsight_is_the_best_row_of_the_curve() -> None:
    rules = {"one loop": Fixed(1)}
    result = evaluate(Ripple(), Addition(), [3, 9], n_samples=40, stopping=rules)
    curve = result.data["loop_exact_match"].sel(estimate="value")
    assert curve["loop"].values.tolist() == list(range(10 + 25 + 1))
    # 3 bits are run for T(3) + 25.
    assert curve.sel(length=3, loop=range(30, 36)).isnull().all()
    assert curve.sel(length=3, loop=range(30)).notnull().all()
    stopped = result.data.sel(estimate="value")
    best = stopped["stopped_exact_match"].sel(rule=BEST)
    assert (best == curve.max("loop")).all()
    at = stopped["stopped_at"].sel(rule=BEST).astype(int)
    assert (curve.sel(loop=at) == best).all()
    assert (stopped["stopped_exact_match"].sel(rule=ANY) >= best).all()
    at_rule = curve.sel(length=9, loop=10)
    assert (at_rule == stopped["exact_match"].sel(length=9, extra_loop=0)).all()


def test_rules_may_read_every_position_and_have_the_same_limit_at_every_length() -> None:
    rules = {"settled": ResidualBelow(1e-3)}
    options = {"distributions": ["uniform"], "n_samples": 20, "stopping": rules, "max_loops": 12}
    early, in_time = (
        evaluate(LateParity(), Parity(), [3, 5], stopping_reads=reads, **options)  # type: ignore[arg-type]
        for reads in ("answer", "state")
    )
    for result, loop, exact in ((early, 1, 0), (in_time, 8, 1)):
        cells = result.data.sel(distribution="uniform", rule="settled")
        assert cells["stopped_at"].values.tolist() == [loop, loop]
        assert cells["stopped_exact_match"].sel(estimate="value").values.tolist() == [exact, exact]
        assert result.data["loop"].values.tolist() == list(range(13))
        assert result.data["loop_exact_match"].notnull().all()


def test_numbers_of_loops_need_not_depend_on_the_length() -> None:
    result = evaluate(Ripple(), Addition(), [4, 8], n_samples=20, loops=[8, 0, 2, 8])
    chain = result.data.sel(distribution="chain", estimate="value")["loop_exact_match"]
    assert chain["loop"].values.tolist() == [0, 2, 8]
    assert chain.sel(length=4).values.tolist() == [0.0, 0.0, 1.0]
    assert chain.sel(length=8).values.tolist() == [0.0, 0.0, 1.0]
    assert result.figures()[-1].data is not None
    shown = result.figures()[-1].data
    assert shown is not None and "loop_perplexity" in shown
    with naming("loops"):
        evaluate(Ripple(), Addition(), [4], n_samples=2, loops=[-1])


@pytest.mark.parametrize(("n_pause", "n_loops"), [(0, 2), (2, None)])
def test_exact_match_is_that_of_greedy_generation(n_pause: int, n_loops: int | None) -> None:
    task = NextToken(of="parity", n_pause=n_pause)
    vocabulary: dict[str, Any] = {"d_vocab": task.d_vocab, "d_vocab_out": task.d_vocab_out}
    recipe = TrainingConfig(
        task="next_token",
        task_settings={"of": "parity", "n_pause": n_pause},
        model=LoopedTransformerConfig(d_model=16, n_heads=2, loop_norm=True, **vocabulary),
        objective=ObjectiveConfig(kind="last", n_loops=2),
        curriculum=CurriculumConfig(kind="none", max_n=3),
        optimiser=OptimiserConfig(lr=2e-2, warmup_steps=0, schedule="constant"),
        device="cpu",
    )
    trainer = Trainer(recipe)
    for _ in range(25):
        trainer.step()
    model = trainer.model.eval()
    model.loop_rule = LoopRule(n_loops) if n_loops else None
    result = evaluate(model, task, [3, 4], n_samples=64, seed=3)
    shares = result.data["exact_match"].sel(extra_loop=0, distribution="uniform", estimate="value")
    for n in (3, 4):
        generator = stream(3, f"evaluation uniform {n}")
        batch = task.sample(n, batch_size=64, generator=generator, distribution="uniform")
        prompts, mask = task.prompt_of(batch)
        written = generate(
            model, prompts, attention_mask=mask, n_loops=n_loops or n, max_new_tokens=n + 3,
            stop_token=task.end,
        )  # fmt: skip
        right = task.is_right(batch, written).double().mean()
        assert float(shares.sel(length=n)) == float(right)
    # Both kinds of answers.
    assert 0 < float(shares.mean()) < 1


def test_perplexity_is_that_of_pytorchs_cross_entropy(tiny: TrainingConfig) -> None:
    from loopinterp.training.device import stream

    model, task = LoopedTransformer(tiny.model), Addition()
    result = evaluate(model, task, [4], n_samples=50, distributions=["uniform"], loops=[2], seed=3)
    drawn = stream(3, "evaluation uniform 4")
    batch = task.sample(4, batch_size=50, generator=drawn, distribution="uniform")
    cells = result.data.sel(length=4, distribution="uniform")
    for loops, perplexity in (
        (5, cells["perplexity"].sel(extra_loop=0)),
        (2, cells["loop_perplexity"]),
    ):
        logits = model(batch.inputs, n_loops=loops)
        doubt = F.cross_entropy(logits.mT, batch.targets, reduction="none", ignore_index=IGNORE)
        expected = doubt.sum(1).div(4).mean().exp().item()
        low, value, high = (
            float(perplexity.sel(estimate=e).squeeze()) for e in ("low", "value", "high")
        )
        assert value == pytest.approx(expected, rel=1e-5)
        assert low < value < high


def test_results_of_before_there_was_a_perplexity_are_read(tmp_path: Path) -> None:
    import dataclasses

    result = evaluate(Ripple(), Addition(), [3], n_samples=4)
    older = dataclasses.replace(result, data=result.data.drop_vars("perplexity"))
    loaded = load_result(older.save(tmp_path))
    assert len(loaded.figures()) == 1 and len(loaded.findings()) == 1 + 3


def test_the_rules_of_the_papers_are_at_hand() -> None:
    rules = stopping_rules([*STOPPING_RULES])
    assert len(rules) == len(STOPPING_RULES)
    options = {"distributions": ["uniform"], "n_samples": 8, "stopping": rules}
    result = evaluate(Ripple(), Addition(), [6], **options)
    exact = result.data["stopped_exact_match"].sel(estimate="value")
    assert exact["rule"].values.tolist() == [ORACLE, *rules, BEST, ANY]
    assert (exact.sel(rule=ORACLE) == 1).all()


@pytest.mark.parametrize("name", ["addition", "copy", "prefix_sum", "unique_set"])
def test_every_distribution_of_a_task_is_judged(name: str) -> None:
    task = get_task(name)
    config = replace(TINY.model, d_vocab=task.d_vocab, d_vocab_out=task.d_vocab_out)
    model = LoopedTransformer(config)
    result = evaluate(model, task, [2], n_samples=2)
    assert tuple(result.data["distribution"].values) == task.distributions
    assert not result.not_judged


@pytest.mark.parametrize(("length", "n_samples"), [(10**8, 2), (4, 10**11), (10**6, 1)])
def test_what_no_machine_could_run_is_refused_at_once(length: int, n_samples: int) -> None:
    with naming("lengths, n_samples"):
        evaluate(Ripple(), get_task("addition"), [length], n_samples=n_samples)


class Operands(AbacusAddition):
    """Operands of given lengths; what the abacus task is to offer itself."""

    drawn = 0

    def sample_operands(
        self, n_a: int, n_b: int, *, batch_size: int, generator: torch.Generator
    ) -> Batch:
        type(self).drawn += 1

        def operand(n: int) -> int:
            return int(torch.randint(10 ** (n - 1), 10**n, (), generator=generator))

        pairs = [(operand(n_a), operand(n_b)) for _ in range(batch_size)]
        return self.encode(pairs)


def small(**changes) -> LoopedTransformer:
    task = AbacusAddition()
    settings = {"d_model": 16, "n_heads": 2, "positions": "relative", "relative_window": 4}
    settings |= {"d_vocab": task.d_vocab, "d_vocab_out": task.d_vocab_out, "loop_norm": True}
    return LoopedTransformer(LoopedTransformerConfig(**settings | changes), seed=1)


def trained() -> LoopedTransformer:
    """A model that is right on some sums of one digit, and wrong on others."""
    model, task = small(), AbacusAddition()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        batch = task.sample(1, batch_size=64, generator=generator)
        logits = model(batch.inputs, n_loops=2)
        loss = torch.nn.functional.cross_entropy(logits.mT, batch.targets, ignore_index=IGNORE)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


@torch.no_grad()
def generated(model: LoopedTransformer, batch: Batch, loops: int) -> list[bool]:
    """Whether each answer is right that is written symbol by symbol, each read back."""
    right = []
    for row, target in zip(batch.inputs, batch.targets):
        places = (target != IGNORE).nonzero()[:, 0].tolist()
        tokens = row[: places[0] + 1]
        for _ in places:
            answer = model(tokens[None], n_loops=loops)[0, -1].argmax()
            tokens = torch.cat([tokens, answer[None]])
        right.append(tokens[places[0] + 1 :].tolist() == target[places].tolist())
    return right


def test_one_pass_scores_what_greedy_generation_writes() -> None:
    model, task = trained(), Operands()
    generator = torch.Generator().manual_seed(5)
    batch = task.sample_operands(1, 1, batch_size=40, generator=generator)
    exact = scores_at(model, batch, [2])[2].exact.tolist()
    assert exact == generated(model, batch, 2)
    # Both kinds of answers.
    assert 0 < sum(exact) < 40


def test_a_grid_that_was_stopped_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    model, task, file = small(), Operands(), tmp_path / "cells.safetensors"
    options = {"loops": [1, 3], "n_samples": 6}
    full = operand_grid(model, task, 2, **options)

    class Killed(Operands):
        def sample_operands(self, n_a, n_b, **rest) -> Batch:
            if (n_a, n_b) == (2, 1):
                raise KeyboardInterrupt
            return super().sample_operands(n_a, n_b, **rest)

    with pytest.raises(KeyboardInterrupt):
        operand_grid(model, Killed(), 2, unfinished=file, **options)
    Operands.drawn = 0
    again = operand_grid(model, task, 2, unfinished=file, **options)
    assert again.data.identical(full.data) and Operands.drawn == 2
    # Cells of other weights are not taken for this model's.
    operand_grid(small(loop_norm=False), task, 2, unfinished=file, **options)
    assert Operands.drawn == 6


def test_a_grid_is_saved_and_shown(tmp_path: Path) -> None:
    grid = operand_grid(small(), Operands(), 2, loops=[1, 2], n_samples=4, trained_up_to=1)
    assert grid.data["exact_match"].dims == ("loop", "n_a", "n_b", "estimate")
    loaded = load_result(grid.save(tmp_path))
    (figure,) = loaded.figures()
    assert figure.section == "generalisation" and figure.caption.endswith("up to 1.")
    assert [t["type"] for t in figure.plot.to_dict()["data"]].count("heatmap") == 2
    assert figure.data is not None and len(figure.data) == 2 * 2 * 2
    exact = grid.data["exact_match"].sel(estimate="value")
    assert np.isfinite(exact).all() and "2 x 2" in loaded.findings()[0].text


def test_a_grid_of_zeros_has_no_best_number_of_loops() -> None:
    grid = operand_grid(small(), Operands(), 2, loops=[1, 2], n_samples=4)
    grid.data["exact_match"][:] = 0
    (finding,) = grid.findings()
    assert finding.good is False and finding.value == "0.00 grid mean"
    grid.data["exact_match"][:] = 0.5
    (finding,) = grid.findings()
    assert finding.good is None and finding.value == "0.50 grid mean"
    assert "50%" in finding.text and "1 or 2 loops" in finding.text


@pytest.mark.parametrize(
    ("model", "task", "changes", "what", "given"),
    [
        (small(), Addition(), {}, "task", "'addition'"),
        (small(causal=False), Operands(), {}, "model", "causal=False"),
        (small(), Operands(), {"loops": [2, 1]}, "loops", "[2, 1]"),
        (small(), Operands(), {"n_samples": 0}, "n_samples", "0"),
    ],
    ids=["no operands", "not causal", "falling loops", "no examples"],
)
def test_what_makes_no_grid_is_refused(model, task, changes, what: str, given: str) -> None:
    with naming(what) as caught:
        operand_grid(model, task, 2, **changes)
    assert caught.value.given == given
