from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from loopinterp import (
    adapters,
    benchmark,
    comparison,
    compiler,
    decompiler,
    dynamics,
    edges,
    features,
    figures,
    interventions,
    lenses,
    models,
    pages,
    probing,
    programs,
    tasks,
    training,
    zoo,
)
from loopinterp.core.results import Result
from loopinterp.core.text import MOST
from loopinterp.decompiler.evidence import Refusal
from loopinterp.pages.facts import Code, Fact, Topic
from loopinterp.tasks import Automaton, get_task, list_tasks
from tests.adapters.kinds import KINDS, adapted
from tests.training.small_sweep import SMALL

ROOMS = (
    adapters,
    comparison,
    decompiler,
    edges,
    features,
    dynamics,
    benchmark,
    lenses,
    models,
    figures,
    probing,
    compiler,
    programs,
    pages,
    tasks,
    training,
    zoo,
)


def _public_classes() -> dict[str, type]:
    named = {name: getattr(room, name) for room in ROOMS for name in room.__all__}
    classes = {name: x for name, x in named.items() if inspect.isclass(x)}
    # Bases; an expression says itself as the code that makes it, however long.
    made_by_nobody = {"Expr", "Seq", "Selector", "InWords", "LinearProbe", "Solver", "HookedRun"}
    made_by_nobody |= {"PublishedModel", "NestedModel", "ExplorerWidget"}
    made_by_nobody |= {"DecimalOperands", "FullOutput", "TokenByToken"}
    return {
        name: cls
        for name, cls in classes.items()
        if not issubclass(cls, Result) and Protocol not in cls.__bases__
        if name not in made_by_nobody
    }


@cache
def _examples() -> dict[str, Any]:
    """One of each, large enough that a dump would be long."""
    program = programs.get_program("ripple")
    compiled = compiler.compile_program(program, max_length=9)
    task = tasks.Addition()
    batch = task.sample(8, batch_size=64, generator=torch.Generator().manual_seed(0))
    model, states = (
        compiled.model,
        dynamics.run_loops(models.bind(compiled.model, batch.inputs), 12),
    )
    pairs = comparison.SpreadPairs(pairs=48, same_value=0)(
        model, [program], batch, torch.Generator().manual_seed(0)
    )
    _, cache = model.run_with_cache(batch.inputs, n_loops=9)
    rule, bound = models.MaxConfidence(), models.bind(model, batch.inputs)
    trace = program.trace(batch.inputs, n_loops=9)
    agreement = compiler.compare_with_program(compiled, batch.inputs, n_loops=9)
    prediction, config = comparison.Prediction(program, pairs), training.RECIPES["addition"]
    given_config = training.GivenModelConfig(
        task="addition", model=config.model, max_n=8, origin="given " * 40
    )
    drawn = compiler.draw(compiled.circuit)
    series = figures.Series("line", list(range(500)), np.arange(500.0))
    verdict = comparison.Verdict(identified=None, closest="ripple", clean_fits=["one of many"] * 30)
    strata = {"token": interventions.Stratum(("a", "b"), torch.zeros(48, dtype=torch.int64))}
    run = training.Run(Path("runs/a"), config)
    with TemporaryDirectory() as folder:
        listed = benchmark.make_benchmark(folder, ["prefix_xor.bare"])
        known = listed["prefix_xor.bare"]
    return {
        **{type(adapted(name)).__name__: adapted(name) for name in KINDS},
        "RepeatedAdapter": adapters.RepeatedAdapter(
            KINDS["albert"].build().eval(), torch.tensor([[0, 1, 2]])
        ),
        "FourMethodAdapter": adapters.FourMethodAdapter(model, batch.inputs, n_loops=4),
        "TokenWords": adapters.TokenWords(object(), 50_000),
        "PublishedConfig": adapted("ouro").config,
        "Fact": Fact(Topic.PROGRAM, Code.UNDECIDED, None),
        "Iteration": bound,
        "LoopedCache": cache,
        "LoopedTransformer": model,
        "LoopedTransformerConfig": config.model,
        "WithVocabulary": models.WithVocabulary(model, tokens=list(range(6)) * 100),
        "AccelerationBelow": models.AccelerationBelow(0.03),
        "AnswerHeld": models.AnswerHeld(2),
        "ConfidenceAbove": models.ConfidenceAbove(0.95),
        "EntropyBelow": models.EntropyBelow(0.1),
        "Fixed": models.Fixed(4),
        "FittedLens": lenses.fit_jacobian_lens(model, batch.inputs[:2, :2], n_loops=2),
        "GateAbove": models.GateAbove(torch.sigmoid),
        "LengthLine": models.LengthLine(1.0, -3.0),
        "MaxConfidence": rule,
        "Oracle": models.Oracle(),
        "ReadoutKL": models.ReadoutKL(0.01),
        "ResidualBelow": models.ResidualBelow(0.01),
        "Stopped": models.run_until(model, batch.inputs, rule, max_loops=9),
        "Difference": models.Difference("embed", 1.0, 2.0, [0, 1]),
        "LoopRule": models.LoopRule(13, of_length=lambda n_pos: n_pos - 1),
        "LoopView": models.LoopView(0, bound.h0, batch.targets >= 0, None, bound.readout, None),
        "Batch": batch,
        **{type(get_task(name)).__name__: get_task(name) for name in list_tasks()},
        "Automaton": Automaton("01", ((0, 1),) * 99, (0,)),
        "SpreadPairs": comparison.SpreadPairs(),
        "Decompiled": decompiler.Decompiled(None, Refusal("reads-farther", 0.5)),
        "InterchangePairs": pairs,
        "InterchangeRun": interventions.InterchangeRun(model, pairs),
        "Prediction": prediction,
        "ProgramModel": comparison.ProgramModel(program, max_length=9),
        "Stratum": strata["token"],
        "UnrolledGraph": edges.UnrolledGraph(model.config, 9),
        "Verdict": verdict,
        "Reason": comparison.Reason("delay", {"first": 0}),
        "Agreement": agreement,
        "ProgramOffset": programs.ProgramOffset(),
        "CeilLog2": programs.CeilLog2(),
        "Circuit": compiled.circuit,
        "CircuitGraph": drawn,
        "GraphNode": drawn.nodes[0],
        "GraphEdge": drawn.edges[0],
        "TransitionTable": decompiler.TransitionTable.from_entries(
            dict.fromkeys(range(9), 9), start={(-1, 0): 0}, step={}, answers={(0, 0): 1}
        ),
        "Claim": decompiler.Claim("exact", 900, 0, 0.004, tuple(range(2, 40))),
        "Compiled": compiled,
        "DisguiseCheck": compiler.check_disguise(
            compiler.rotate(compiled, seed=0), compiled, batch.inputs, n_loops=9
        ),
        "Linear": programs.Linear(),
        "Intervention": programs.Intervention("c", 2, batch.targets),
        "LoopProgram": program,
        "Superposition": compiler.Superposition(8, 12),
        "Trace": trace,
        "Anderson": dynamics.Anderson(),
        "Broyden": dynamics.Broyden(),
        "NewtonKrylov": dynamics.NewtonKrylov(),
        "Picard": dynamics.Picard(),
        "Limits": dynamics.find_limits(bound, bound.h0, max_loops=4),
        "LoopMeasures": next(dynamics.stream_measures(bound, 1))[2],
        "ContractionRates": dynamics.contraction_rates(states),
        "FixedPoint": dynamics.find_fixed_point(bound.step, bound.h0),
        "Regime": dynamics.Regime.ORBIT,
        "RegimeCriteria": dynamics.RegimeCriteria(),
        "Regimes": dynamics.classify_regimes(states),
        "LayerLimits": dynamics.LayerLimits(states[:, None, :, 0, 0], states[:2], states[:2]),
        "PrincipalAxes": dynamics.principal_axes(states),
        "Rotation": dynamics.find_rotation(torch.randn(20, 1, 4)),
        "SettlingClass": dynamics.SettlingClass.MARGINAL,
        "SettlingClasses": dynamics.classify_settling(states),
        "SettlingCriteria": dynamics.SettlingCriteria(),
        "Spectrum": dynamics.spectral_radius(bound.select(slice(2)).step, states[-1, :2]),
        "Eigenvalues": dynamics.leading_eigenvalues(torch.cos, states[0, :1, :1], 1),
        "FixedPointCondition": dynamics.fixed_point_condition(torch.cos, states[0, :1, :1]),
        "LyapunovExponents": dynamics.lyapunov_exponents(torch.cos, states[0, :1, :1], 8),
        "SingularValues": dynamics.largest_singular_values(torch.cos, states[0, :1, :1], 1),
        "TransientGrowth": dynamics.transient_growth(torch.cos, states[0, :1, :1], 1),
        "Status": dynamics.Status.CONVERGED,
        "AutoencoderConfig": features.AutoencoderConfig(d_in=4, n_features=8),
        "SparseAutoencoder": features.SparseAutoencoder(
            features.AutoencoderConfig(d_in=4, n_features=8)
        ),
        "ChainSample": probing.sample_chains(
            task, n=24, max_chain=4, n_pairs=4, generator=torch.Generator().manual_seed(0)
        ),
        "LogisticProbe": probing.LogisticProbe(),
        "RidgeProbe": probing.RidgeProbe(),
        "CodeConfig": training.CodeConfig(),
        "CurriculumConfig": config.curriculum,
        "FiniteStage": training.FiniteStage(4, run, False, {12: 1.0}),
        "ObjectiveConfig": config.objective,
        "OptimiserConfig": config.optimiser,
        "SnapshotConfig": config.snapshots,
        "TrainingConfig": config,
        "Sweep": SMALL,
        "SweepEvaluation": SMALL.evaluation,
        "SweepScale": training.SweepScale(about="minutes"),
        "GivenModelConfig": given_config,
        "Recipe": training.get_recipe("addition"),
        "Measurement": training.get_recipe("addition").measured,
        "Card": zoo.get_card("addition"),
        "Run": run,
        "Trainer": training.Trainer(training.RECIPES["addition-quick"]),
        "Benchmark": listed,
        "BenchmarkModel": known.about,
        "Check": benchmark.CHECKS[0],
        "Exercise": known.exercise,
        "KnownCircuit": known,
        "KnownModel": benchmark.KnownModel(compiled, batch, 9),
        "Score": benchmark.Score(1.0),
        "RunRecord": pages.RunRecord(
            name="a", config=config.to_dict(), metrics=[{"step": k} for k in range(999)]
        ),
        "LinePanel": figures.LinePanel([series] * 3, "loss"),
        "Reference": figures.Reference(1.0, "here"),
        "Series": series,
        "ActivationStore": models.store_activations(
            model, batch.inputs, mkdtemp(), names_filter="hook_state_post", n_loops=9
        ),
        "AdaptedModelConfig": adapters.AdaptedModelConfig.of(zoo.load_pretrained("ouro-small")),
    }


def test_every_public_class_is_among_those_looked_at() -> None:
    assert _public_classes().keys() - _examples().keys() == set()


@pytest.mark.parametrize("name", sorted(_public_classes()))
def test_an_object_says_itself_in_a_line_or_two(name: str) -> None:
    example = _examples()[name]
    text = repr(example)
    assert text and "\n" not in text
    assert len(text) <= MOST
    for dumped in ("tensor(", "array(", "object at 0x", "xarray.Dataset"):
        assert dumped not in text
    if hasattr(example, "_repr_html_"):
        page = example._repr_html_()
        assert page.startswith(("<p>", "<pre>", "<style>", "<div")) and "tensor(" not in page


@pytest.mark.parametrize(
    "name", ["Batch", "Run", "Verdict", "Circuit", "LoopProgram", "LoopedCache", "TrainingConfig"]
)
def test_what_is_worth_more_than_a_line_shows_itself_in_a_notebook(name: str) -> None:
    show: Callable[[], str] = _examples()[name]._repr_html_
    assert len(show()) > len(repr(_examples()[name]))


def test_a_batch_says_how_many_examples_of_which_length() -> None:
    parts = ("Batch(", "examples=64", "n=8", "n_loops=9", "int64[64, 9]")
    assert all(part in repr(_examples()["Batch"]) for part in parts)
    mixed = get_task("addition").sample(
        torch.tensor([3, 5]), generator=torch.Generator().manual_seed(0)
    )
    assert "n=[3, 5]" in repr(mixed)
    assert repr(mixed[:0]).startswith("Batch(examples=0")


def test_a_long_configuration_says_what_is_not_the_default() -> None:
    config = training.RECIPES["addition"]
    assert f"steps={config.steps}" in repr(config)
    assert f"d_model={config.model.d_model}" in repr(config.model)
    assert "bos" not in repr(config.model).lower()


def test_every_result_can_be_shown_drawn_and_tabulated() -> None:
    for room in ROOMS:
        for name in room.__all__:
            cls = getattr(room, name)
            if inspect.isclass(cls) and issubclass(cls, Result):
                for method in ("show", "figures", "findings", "to_dataframe", "_repr_html_"):
                    assert callable(getattr(cls, method)), name
                assert cls.kind and cls.__repr__ is Result.__repr__
