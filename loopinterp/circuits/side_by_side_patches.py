"""Patches of one site at many loops, heads and positions, side by side in the cone of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from loopinterp.circuits.causal_cone import CausalCone, Change
from loopinterp.models.taps import Taps

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from loopinterp.models.sites import Place


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SideBySide:
    """Patches that differ in loop, donor, head and place, each made in every run of a batch.

    Where a donor has what is there already, nothing is run.

    Attributes:
        cone: The runs that are patched, after as many loops as patches are counted from.
        own: What is there without a patch, ``[loop, batch, ...]``.
        donors: What is put in, ``[loop, donor, batch, ...]``.
        loops: Loops done before each patch.
        chosen: Which positions of each run are patched at each place.
        n_heads: Heads that are patched one by one; None where all are at once.
        site: Component, and where it stands in the loop; None for the state.
        attention: Whether it is one of pairs of positions, ``[batch, head, query, key]``.
    """

    cone: CausalCone
    own: Float[Tensor, "loop batch ..."]
    donors: Float[Tensor, "loop donor batch ..."]
    loops: list[int]
    chosen: Bool[Tensor, "place batch pos"]
    n_heads: int | None
    site: tuple[str, Place] | None
    attention: bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Loops, donors, heads and places."""
        n_loops, n_donors, *_ = self.donors.shape
        return n_loops, n_donors, self.n_heads or 1, len(self.chosen)

    def logits(
        self, undisturbed: Float[Tensor, "batch pos d_vocab_out"], at_a_time: int
    ) -> Iterator[tuple[Tensor, Float[Tensor, "patch batch pos d_vocab_out"]]]:
        """Numbers of some patches, counted in C order of :attr:`shape`, and logits of their runs.

        Patches of nearly equal positions go on together, whatever their loops.

        Args:
            undisturbed: Logits of the runs.
            at_a_time: Rows that are run together, at least one patch of all runs; of cones more.
        """
        patches = torch.cartesian_prod(*map(torch.arange, self.shape))
        loop, place = patches[:, 0], patches[:, 3]
        order = (place * len(self.loops) + loop).argsort(stable=True)
        # A cone holds a third of the positions or so that have to be held without one.
        rows = at_a_time if self.cone.reach is None else 3 * at_a_time
        for part in order.split(max(1, rows // self.chosen.shape[1])):
            part = part[loop[part].argsort(stable=True)]
            yield part, self._run(patches[part], undisturbed)

    def _run(
        self, patches: Int[Tensor, "patch 4"], undisturbed: Tensor
    ) -> Float[Tensor, "patch batch pos d_vocab_out"]:
        """Logits of some patches, in the order of their loops."""
        n_patches, batch, device = len(patches), self.chosen.shape[1], self.chosen.device
        row = torch.arange(batch).repeat(n_patches).to(device)
        loop, donor, head, place = (
            x.repeat_interleave(batch).to(device) for x in patches.unbind(1)
        )
        changes = self._changes[loop, donor, row, :, head] & self.chosen[place, row]
        found = undisturbed.repeat(n_patches, 1, 1)
        if bool((live := changes.any(1)).any()):
            chosen = self.chosen[place, row][live]
            loop, donor, head, row = (x[live] for x in (loop, donor, head, row))
            found[live] = self._changed(loop, donor, head, row, chosen, undisturbed)
        return found.unflatten(0, (n_patches, batch))

    @cached_property
    def _changes(self) -> Bool[Tensor, "loop donor batch pos head"]:
        """Where donors have something else than what is there."""
        changes = (self.donors != self.own[:, None]).any(-1)
        if self.attention:  # of a query
            return changes.mT
        return changes if self.n_heads is not None else changes[..., None]

    def _changed(
        self,
        loop: Tensor,
        donor: Tensor,
        head: Tensor,
        row: Tensor,
        chosen: Bool[Tensor, "row pos"],
        undisturbed: Tensor,
    ) -> Float[Tensor, "row pos d_vocab_out"]:
        """Logits of patched rows, in the order of their loops."""
        device = chosen.device
        first, back = chosen.int().argmax(1), chosen.flip(1).int().argmax(1)
        n_pos = chosen.shape[1]

        def put(new: slice, places: Tensor, x: Tensor) -> Tensor:
            inside = places.clamp(max=n_pos - 1)
            here = chosen[new].gather(1, inside) & (places < n_pos)
            each = loop[new, None], donor[new, None], row[new, None]
            if self.attention:
                square = x.shape[-1] == x.shape[-2]
                keys = inside if square else torch.arange(n_pos, device=device)[None]
                each = tuple(one[:, :, None] for one in each)
                given = self.donors[(*each, slice(None), inside[:, :, None], keys[:, None])]
                given, here = given.movedim(-1, 1), here[:, None, :, None]
                if square:  # keys past the end are none
                    here = here & (places < n_pos)[:, None, None]
            else:
                given, here = self.donors[(*each, inside)], here[:, :, None]
                here = here if self.n_heads is None else here[..., None]
            if self.n_heads is not None:
                mine = torch.arange(self.n_heads, device=device) == head[new, None]
                here = here & (mine[:, :, None, None] if self.attention else mine[:, None, :, None])
            return torch.where(here, given, x)

        def within(new: slice, places: Tensor) -> Taps:
            def changed(x: Tensor) -> Tensor:  # rows that begin are the last ones
                patched = put(new, places, x[new])
                return torch.cat([x[: new.start], patched]) if new.start else patched

            component, at = self.site or ("", ("", None, None))
            return Taps.changing({at: {component: changed}})

        change = Change(state=put) if self.site is None else Change(within=within)
        done = torch.tensor(self.loops, device=device)[loop]
        front = self.cone.finish(row, done, first, n_pos - 1 - back, change)
        return self.cone.read(front, row, undisturbed)
