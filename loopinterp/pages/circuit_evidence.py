"""What a run's saved results say of the parts of a circuit, each number with its control.

A compiled circuit is the program's, the numbers are those of the model studied: the head that is
assigned to a selector, what is lost without it, how well a variable can be read from the state and
whether the model follows when it is exchanged.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from loopinterp.core.results import Result
from loopinterp.core.text import percent

Evidence = Mapping[str, list[tuple[str, str]]]
"""Name of a selector, of ``program.variable`` or of a component -> headings and texts."""


def evidence_by_name(results: Mapping[str, Result], problems: list[str]) -> Evidence:
    """What results say of selectors, variables and components.

    Args:
        results: Saved results by name.
        problems: Where a sentence is added for each that cannot be read.
    """
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    readers = {
        "ablation": _of_ablation,
        "head-match": _of_heads,
        "decodability": _of_decodability,
        "variable-interchange": _of_interchange,
    }
    for kind, read in readers.items():
        for name, result in results.items():
            if result.kind == kind:
                try:
                    read(result, found)
                except Exception as error:  # whatever a damaged value makes of xarray's own code
                    problems.append(
                        f"{name} has values that cannot be told of a circuit "
                        f"({type(error).__name__}). Run the study again."
                    )
    return dict(found)


def _of_ablation(result: Result, found: dict[str, list[tuple[str, str]]]) -> None:
    data = result.data.isel(pos=0)
    everywhere = str(data["when"].values[0])
    undisturbed = float(data["reference_exact_match"].sel(estimate="value"))
    for part in map(str, data["part"].values):
        at = data.sel({"part": part, "when": everywhere, "estimate": "value"})
        texts = [
            f"{of['ablation'].item()}: {percent(of['exact_match'])} right "
            f"(noise of equal norm: {percent(of['control_exact_match'])})"
            for of in (at.isel(ablation=k) for k in range(at.sizes["ablation"]))
        ]
        said = f"{part}, {everywhere}. {'; '.join(texts)}. Undisturbed {percent(undisturbed)}."
        found[part].append(("Ablation", said))


def _of_heads(result: Result, found: dict[str, list[tuple[str, str]]]) -> None:
    means = result.data[["overlap", "overlap_even", "overlap_other_input"]].mean("loop")
    for selector, head in zip(map(str, means["selector"].values), getattr(result, "assigned", [])):
        if not head:
            continue
        at = means.sel(selector=selector, head=head)
        text = (
            f"{head} comes nearest: its attention overlaps by {percent(at['overlap'])} with what "
            f"“{selector}” selects (even attention: {percent(at['overlap_even'])}; what it selects "
            f"in another input: {percent(at['overlap_other_input'])}), mean over loops."
        )
        for name in selector.split(" = "):
            found[name].append(("In the model studied", text))
            part = re.sub(r"^head (\d+)$", r"head 0.\1", head)
            found[name] += [fact for fact in found.get(part, []) if fact[0] == "Ablation"]


def _of_decodability(result: Result, found: dict[str, list[tuple[str, str]]]) -> None:
    loops = result.data["loop"].values
    same = {"loop": loops, "program_loop": loops}
    controls = {"random_weights": "random weights", "shuffled": "shuffled labels"}
    controls["embedding"] = "injected input alone"
    for variable in map(str, result.data["variable"].values):
        own = result.data.sel(variable=variable)

        def along(name: str, own=own) -> np.ndarray:
            array = own[name]
            if "loop" not in array.dims:
                return array.values[1:]
            return np.diagonal(array.sel(same).transpose("loop", "program_loop").values)[1:]

        accuracy = along("accuracy")
        if np.isnan(accuracy).all():
            continue
        beside = [
            f"{words} at most {np.nanmax(along(name)):.2f}"
            for name, words in controls.items()
            if name in own and not np.isnan(along(name)).all()
        ]
        text = (
            "A linear probe reads it from the state, loop for loop, with balanced accuracy of at "
            f"least {np.nanmin(accuracy):.2f} ({'; '.join(beside)})."
        )
        found[variable].append(("In the model studied", text))


def _of_interchange(result: Result, found: dict[str, list[tuple[str, str]]]) -> None:
    data = result.data
    for variable in map(str, data["variable"].values):
        shares = {}
        for name in map(str, data["intervention"].values):
            at = data.sel({"intervention": name, "variable": variable, "estimate": "value"})
            n, share = at["whole_run_pairs"].values, at["whole_run"].values
            if n.sum():
                shares[name] = float(np.nansum(share * n) / n.sum()), int(n.sum())
        texts = [f"{name} {percent(share)} of {n}" for name, (share, n) in shares.items()]
        text = f"Whole runs that follow the program after an exchange of: {'; '.join(texts)}."
        program = getattr(result, "program", "")
        found[f"{program}.{variable}"].append(("Exchanged in the model studied", text))
