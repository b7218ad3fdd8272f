"""What a run's saved results measured about each part of a program's circuit, with controls."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from loopinterp.core.results import Result
from loopinterp.core.text import percent
from loopinterp.pages.run_record import Problem, Trouble, noting

Evidence = Mapping[str, list[tuple[str, str]]]
"""Headings and texts by the name of a selector, ``program.variable`` or component."""


def evidence_by_name(results: Mapping[str, Result], problems: list[Problem]) -> Evidence:
    """Evidence by name; unreadable results are added to ``problems``."""
    facts: dict[str, list[tuple[str, str]]] = defaultdict(list)
    readers = {
        "ablation": _of_ablation,
        "head-match": _of_heads,
        "decodability": _of_decodability,
        "variable-interchange": _of_interchange,
    }
    for kind, read in readers.items():
        for name, result in results.items():
            if result.kind == kind:
                with noting(problems, Trouble.CIRCUIT_VALUES, name):
                    read(result, facts)
    return dict(facts)


def _of_ablation(result: Result, facts: dict[str, list[tuple[str, str]]]) -> None:
    data = result.data.isel(pos=0)
    everywhere = str(data["when"].values[0])
    # Exact match without ablation.
    clean = percent(data["reference_exact_match"].sel(estimate="value"))
    for part in map(str, data["part"].values):
        at = data.sel({"part": part, "when": everywhere, "estimate": "value"})
        texts = [
            f"{kind['ablation'].item()}: {percent(kind['exact_match'])} right "
            f"(noise of equal norm: {percent(kind['control_exact_match'])})"
            for kind in (at.isel(ablation=k) for k in range(at.sizes["ablation"]))
        ]
        text = f"{part}, {everywhere}. {'; '.join(texts)}. Clean runs: {clean}."
        facts[part].append(("Ablation", text))


def _of_heads(result: Result, facts: dict[str, list[tuple[str, str]]]) -> None:
    # Means over all loops, by selector and head.
    means = result.data[["overlap", "overlap_even", "overlap_other_input"]].mean("loop")
    for selector, head in zip(map(str, means["selector"].values), getattr(result, "assigned", [])):
        if not head:
            continue
        at = means.sel(selector=selector, head=head)
        text = (
            f"{head} is closest: its attention overlaps by {percent(at['overlap'])} with what "
            f"“{selector}” selects (even attention: {percent(at['overlap_even'])}; what it selects "
            f"in another input: {percent(at['overlap_other_input'])}), mean over loops."
        )
        for name in selector.split(" = "):
            facts[name].append(("In the model studied", text))
            part = re.sub(r"^head (\d+)$", r"head 0.\1", head)
            facts[name] += [fact for fact in facts.get(part, []) if fact[0] == "Ablation"]


def _of_decodability(result: Result, facts: dict[str, list[tuple[str, str]]]) -> None:
    loops = result.data["loop"].values
    controls = {"random_weights": "random weights", "shuffled": "shuffled labels"}
    controls["embedding"] = "injected input alone"
    for variable in map(str, result.data["variable"].values):
        measured = {}
        for name, values in result.data.sel(variable=variable).items():
            if name in ("accuracy", *controls):
                if "loop" in values.dims:  # loop for loop: of both axes the diagonal
                    same = values.sel(loop=loops, program_loop=loops)
                    values = same.transpose("loop", "program_loop").values.diagonal()
                measured[str(name)] = np.asarray(values)[1:]
        known = {name: x for name, x in measured.items() if not np.isnan(x).all()}
        if "accuracy" not in known:
            continue
        ceilings = [
            f"{words} at most {np.nanmax(known[name]):.2f}"
            for name, words in controls.items()
            if name in known
        ]
        text = (
            "A linear probe reads it from the state, loop for loop, with balanced accuracy of at "
            f"least {np.nanmin(known['accuracy']):.2f} ({'; '.join(ceilings)})."
        )
        facts[variable].append(("In the model studied", text))


def _of_interchange(result: Result, facts: dict[str, list[tuple[str, str]]]) -> None:
    program = getattr(result, "program", "")
    for variable in map(str, result.data["variable"].values):
        texts = []
        for name in map(str, result.data["intervention"].values):
            at = result.data.sel(intervention=name, variable=variable, estimate="value")
            n, share = at["whole_run_pairs"].values, at["whole_run"].values
            if n.sum():
                # Mean share over loops, weighted by pairs.
                mean = float(np.nansum(share * n) / n.sum())
                texts.append(f"{name} {percent(mean)} of {int(n.sum())}")
        text = f"Whole runs predicted by the program after an interchange of: {'; '.join(texts)}."
        facts[f"{program}.{variable}"].append(("Interchanged in the model studied", text))
