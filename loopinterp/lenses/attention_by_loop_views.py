"""What a study of attention by loop says and shows."""

from __future__ import annotations

import xarray as xr

from loopinterp.intervals import ESTIMATE
from loopinterp.lenses.attention_by_loop import AttentionResult
from loopinterp.plotting import (
    LinePanel,
    Series,
    by_head,
    head_lines,
    line_panels,
    loop_slider_figure,
)
from loopinterp.results import Figure, Finding, figures_of, findings_of, percent, tidy

SECTION = "attention"


@findings_of.register
def _(result: AttentionResult) -> list[Finding]:
    """The heads that prefer a distance and a place most, the clearer preference first."""
    preferences = {"mass": result.strongest(), "received": result.strongest_sink()}
    found = [_preference(result, name, best) for name, best in preferences.items() if best]
    clear = sorted(filter(None, found), key=lambda one: one[0], reverse=True)
    if clear:
        return [finding for _, finding in clear]
    text = (
        "No head clearly prefers a distance or a place: none gives any of them more attention "
        "than if it were spread evenly, by more than the interval over examples."
    )
    return [Finding(text, value="no preference")]


def _preference(
    result: AttentionResult, name: str, best: dict[str, int]
) -> tuple[float, Finding] | None:
    """By how much a share over all loops exceeds even attention, and so in words.

    None where even attention lies within the interval of the share.
    """
    *_, (axis, at) = best.items()
    share = result.data[name].sel(best).mean("loop")
    value, low = (float(share.sel({ESTIMATE: end})) for end in ("value", "low"))
    even = float(result.data[f"{name}_even"].sel({"head": best["head"], axis: at}))
    if low <= even:
        return None
    where = place(at) if axis == "distance" else _key(result, at)
    means = ["loops"] if result.data.sizes["loop"] > 1 else []
    means += ["positions, whatever their distance"] if axis != "distance" else []
    over = f" (mean over {' and '.join(means)})" if means else ""
    text = (
        f"{_head_name(result, best).capitalize()} gives {percent(value)} of its attention to "
        f"{where}{over}, against "
        f"{percent(even)} if it were spread evenly over what a position may see."
    )
    return value - even, Finding(text, value=f"{percent(value)} on {where}")


def _key(result: AttentionResult, key: int) -> str:
    """A place in words; by what stands there, if that is the same in all examples."""
    named = result.fixed[key] and result.labels[key] != str(key)
    return result.labels[key] if named else f"position {key}"


@figures_of.register
def _(result: AttentionResult) -> list[Figure]:
    """The patterns with their slider, and where heads look by loop."""
    return [_patterns(result), _by_loop(result)]


def _head_name(result: AttentionResult, at: dict[str, int]) -> str:
    names = by_head(result.data["entropy"])["head"].values
    return str(names[at["layer"] * result.data.sizes["head"] + at["head"]])


def _patterns(result: AttentionResult) -> Figure:
    numbered = result.labels == [str(k) for k in range(len(result.labels))]
    places = [label if numbered else f"{k} · {label}" for k, label in enumerate(result.labels)]
    patterns = by_head(result.data["patterns"]).transpose("loop", "head", "query", "key")
    patterns = patterns.assign_coords(query=places, key=places)
    plot = loop_slider_figure(
        patterns, x_title="looked at (key)", y_title="looking (query)", value_title="attention"
    )
    several = result.data.sizes["loop"] > 1
    move = (
        " Move the slider to go from loop to loop; a pattern that no longer changes belongs to a "
        "head that has settled."
    )
    return Figure(
        title="Attention patterns, loop by loop" if several else "Attention patterns",
        plot=plot,
        caption=(
            "One example. Each row is a position, and its colour shows how much it looks at each "
            f"position of the sequence (a row sums to 1).{move if several else ''}"
        ),
        control=(
            "A head without preference colours alike all positions that a row may see; “Where "
            "heads look” measures every head against that, over many examples."
        ),
        data=tidy({"attention": patterns}).query("attention > 1e-3").round(4),
    )


def _by_loop(result: AttentionResult) -> Figure:
    best, sink = result.strongest()["distance"], result.strongest_sink()
    where = place(best)
    shares = {f"Attention to {where}": ("mass", {"distance": best})}
    if sink:
        key = {"key": sink["key"]}
        shares[f"Attention to {_key(result, sink['key'])}, from afar too"] = ("received", key)
    panels, columns = [], {"entropy": result.data["entropy"]}
    for title, (name, at) in shares.items():
        share = result.data[name].sel(at, drop=True)
        even = result.data[f"{name}_even"].sel(at, drop=True)
        lines = [*head_lines(share), *_even_lines(even, share["loop"])]
        panels.append(LinePanel(lines, "attention", title=title, y_range=(0, 1.02)))
        columns |= {name: share, f"{name}_even": even.broadcast_like(result.data["entropy"])}
    entropy, even = result.data["entropy"], result.data["entropy_even"]
    columns |= {"entropy_even": even.broadcast_like(entropy)}
    lines = [*head_lines(entropy), *_even_lines(even, entropy["loop"])]
    panels.append(LinePanel(lines, "bits", title="Entropy of attention"))
    of_sink = ", and to the place that gets most from all positions that may see it" if sink else ""
    return Figure(
        title="Where heads look" + " as loops go on" * (result.data.sizes["loop"] > 1),
        plot=line_panels(panels, x_title="loop"),
        caption=(
            f"Above, the share of attention that each head gives to {where}{of_sink}, with 95% "
            f"intervals over {result.n_examples} examples. Below, how widely a head spreads its "
            "attention: 0 bits is a single position."
        ),
        control=(
            "The dashed grey line is attention spread evenly over the positions that may be seen. "
            "A head on that line has no preference."
        ),
        data=tidy(columns).assign(distance=best),
    )


def _even_lines(even: xr.DataArray, loop: xr.DataArray) -> list[Series]:
    """The control of each head; one line for all heads that may see alike."""
    alike: dict[float, list[str]] = {}
    for head in even.dropna("head"):
        alike.setdefault(float(head), []).append(str(int(head["head"])))
    return [
        Series.of(
            "even attention" if len(alike) == 1 else f"even attention, head {', '.join(heads)}",
            xr.full_like(loop, value, dtype=float),
            control=True,
        )
        for value, heads in alike.items()
    ]


def place(distance: int) -> str:
    """A distance in words.

    Example:
        >>> place(0), place(1), place(-3)
        ('the position itself', 'the left neighbour', '3 positions to the right')
    """
    if distance == 0:
        return "the position itself"
    side = "left" if distance > 0 else "right"
    if abs(distance) == 1:
        return f"the {side} neighbour"
    return f"{abs(distance)} positions to the {side}"
