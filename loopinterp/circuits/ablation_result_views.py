"""What an ablation study says and shows: which parts are needed, and for what."""

from __future__ import annotations

import plotly.graph_objects as go
import xarray as xr

from loopinterp.circuits.ablation_result import CONTROL, LINE, MEASURES, AblationStudy, Role
from loopinterp.plotting import Series, bars_with_intervals, heatmap_panels
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent

SECTION = "program"

_NAMED = 4
_NOISE = "noise of equal norm"
_CONTROL_TEXT = (
    "Noise of equal norm: the activation is moved as far as the ablation moves it, in a random "
    "direction. It says whether the model bears a change of that size there. Where it does not, "
    "zero ablation and mean ablation say nothing of what the part carries; another example's "
    "activation is one that the part has in some run, so that what it changes is due to what it "
    "says of the input."
)
_ROLES: dict[Role, tuple[str, str]] = {
    "information": ("needed", "answers change where another example's activation is put in"),
    "needed": ("needed", "answers change where it is set to zero"),
    "constant": ("needed as a constant", "only what is the same in all examples counts"),
    "unclear": ("unclear", f"too few answers change to be sure of {percent(LINE)}"),
    "idle": ("without effect", "no answer changes, whichever way it is ablated"),
}


@findings_of.register
def _(result: AblationStudy) -> list[Finding]:
    """The parts that are needed and for what, and those that do nothing."""
    roles = result.roles()
    by_role = {role: [part for part, of in roles.items() if of == role] for role in _ROLES}
    some: list[Role] = [role for role in _ROLES if by_role[role]]
    when, n = result.widest, len(roles)
    where = f"at {when}" if when.startswith("all") else f"in {when}"
    somewhere = " at some one position" if result.data.sizes["pos"] > 1 else ""
    said = "; ".join(
        f"{_ROLES[role][0]}: {_spell(by_role[role])}, as {_ROLES[role][1]}" for role in some
    )
    kept = percent(result.reference().sel(estimate="value"))
    text = (
        f"{n} parts ablated {where}{somewhere}, each {_kinds(result)}. {_capital(said)}. "
        f"A part is needed if this surely changes the answers of {percent(LINE)} of the inputs "
        f"({result.n_examples} examples; {kept} right in the clean run)."
    )
    needed = len(by_role["information"]) + len(by_role["needed"])
    return [Finding(text, value=f"{needed} of {n}")]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _spell(parts: list[str]) -> str:
    more = f" and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
    return f"{len(parts)} ({', '.join(parts[:_NAMED])}{more})"


def _kinds(result: AblationStudy) -> str:
    means = {"position": "at its position", "token": "of its token", "all": "of all positions"}
    words = {
        "zero": "set to zero",
        "mean": f"set to the mean {means[result.mean_over]} in that loop",
        "resample": "taken from another example",
    }
    return " or ".join(words[kind] for kind in result.data["ablation"].values)


@figures_of.register
def _(result: AblationStudy) -> list[Figure]:
    """Parts against loops, against positions, or alone."""
    worst = result.data.min("ablation").sel(estimate="value", drop=True)
    if result.data.sizes["when"] > 1:
        rest, x_title = worst.min("pos"), "ablated at"
        how = "at any one position, " if result.data.sizes["pos"] > 1 else ""
    elif result.data.sizes["pos"] > 1:
        rest, x_title, how = worst.isel(when=0), "position ablated", ""
    else:
        return [_figure(result, _bars(result), "")]
    panels = {
        "answers kept": rest["agreement"],
        f"answers kept, {_NOISE}": rest[f"{CONTROL}agreement"],
    }
    plot = heatmap_panels(
        panels, x_title=x_title, y_title="part", value_title="share", scale="mass", y_down=True
    )
    how = f"Of the kinds of ablation, {how}that which changes most is shown, and so of their noise."
    return [_figure(result, plot, how)]


def _bars(result: AblationStudy) -> go.Figure:
    data = result.data.isel(when=0, pos=0)
    bars = []
    for kind in map(str, data["ablation"].values):
        own: xr.Dataset = data.sel(ablation=kind)
        bars.append(Series.of(kind, own["agreement"]))
        bars.append(Series.of(f"{_NOISE}, {kind}", own[f"{CONTROL}agreement"], control=True))
    return bars_with_intervals(bars, value_title="examples answered as before", value_range=(0, 1))


def _figure(result: AblationStudy, plot: go.Figure, how: str) -> Figure:
    names = [prefix + name for prefix in ("", CONTROL) for name in MEASURES]
    return Figure(
        title="Answers without one part",
        plot=plot,
        caption=(
            "The model is run without one head, MLP or other part, which is "
            f"{_kinds(result)}. Answers kept: the share of {result.n_examples} examples that are "
            f"answered as by the undisturbed run. {how}".strip()
        ),
        control=_CONTROL_TEXT,
        data=result.to_dataframe(*names),
    )
