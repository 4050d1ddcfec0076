"""The samples of a rank's part of a step as they are loaded: members first, then their trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dynapar.data.materialize import Materializer
from dynapar.data.pieces import Piece
from dynapar.data.samples import LoadedSample
from dynapar.data.trees import join_members, prefix_fault
from dynapar.errors import SampleError
from dynapar.meta import IntArray
from dynapar.plan import StepPlan


class Parts:
    """Loaded samples of the source, under their ids in the step; each is loaded once."""

    def __init__(
        self,
        materializer: Materializer,
        plan: StepPlan,
        pieces: Mapping[int, Sequence[Piece]],
        *,
        rows: IntArray,
        drawn: Sequence[str],
    ) -> None:
        """Load them; those that cannot be, or that differ in a prefix, become stubs.

        Args:
            materializer: Loads samples of the index.
            plan: Of the step.
            pieces: As of `pieces_of`.
            rows: Of the index, by place in the step.
            drawn: Ids, by place in the step.
        """
        self._materializer, self._plan, self._pieces = materializer, plan, pieces
        self._rows, self._drawn = rows, drawn
        self._loaded = {
            piece.place: self._named(
                piece, materializer.load(int(rows[piece.place]), units=piece.units)
            )
            for own in pieces.values()
            for piece in own
        }
        for row, own in pieces.items():
            if len(own) > 1:
                self._refuse_unlike(row, own)

    def stubs(self) -> tuple[str, ...]:
        """Ids of those that are stubs."""
        return tuple(sample.id for sample in self._loaded.values() if sample.stub)

    def reason(self, name: str) -> str:
        """Why a sample is a stub; empty where it is not one here."""
        return next((each.stub for each in self._loaded.values() if each.id == name), "")

    def make_stubs(self, names: Sequence[str]) -> None:
        """Make stubs of samples that another rank could not load."""
        for own in self._pieces.values():
            for piece in own:
                name = self._drawn[piece.place]
                if name in names and not self._loaded[piece.place].stub:
                    stub = self._materializer.stub(
                        int(self._rows[piece.place]),
                        units=piece.units,
                        reason=f"another rank could not load {name!r}",
                    )
                    self._loaded[piece.place] = self._named(piece, stub)

    def samples(self) -> dict[int, LoadedSample]:
        """By row of the plan.

        Raises:
            SampleError: The media of a prefix can be loaded with no member of its tree.
        """
        found = {}
        for row, own in self._pieces.items():
            if len(own) == 1:
                found[row] = self._loaded[own[0].place]
            else:
                found[row] = self._tree(row, own)
        return found

    def _tree(self, row: int, own: Sequence[Piece]) -> LoadedSample:
        table = self._plan.samples
        assert table.trees is not None
        shared = int(table.trees.prefix_units[row])
        members = [self._loaded[piece.place] for piece in own]
        lead = next((place for place, each in enumerate(members) if not each.stub), 0)
        needed = frozenset(unit for unit in own[0].units if unit < shared)
        if lead > 0 and needed:
            # The first member, which has the prefix's media, is a stub: take them from another one.
            piece = own[lead]
            again = self._materializer.load(
                int(self._rows[piece.place]), units=piece.units | needed
            )
            if again.stub:
                raise SampleError(
                    f"the media of prefix {table.trees.prefix_ids[row]!r} cannot be loaded with "
                    f"sample {self._drawn[piece.place]!r}: {again.stub}"
                )
            members[lead] = self._named(piece, again)
        return join_members(
            table.ids[row],
            members,
            prefix_tokens=int(table.trees.prefix_tokens[row]),
            prefix_units=shared,
        )

    def _refuse_unlike(self, row: int, own: Sequence[Piece]) -> None:
        trees = self._plan.samples.trees
        assert trees is not None
        whole = [piece for piece in own if not self._loaded[piece.place].stub]
        for piece in whole[1:]:
            fault = prefix_fault(
                self._loaded[whole[0].place],
                self._loaded[piece.place],
                int(trees.prefix_tokens[row]),
            )
            if fault:
                stub = self._materializer.refuse(
                    int(self._rows[piece.place]), units=piece.units, reason=fault
                )
                self._loaded[piece.place] = self._named(piece, stub)

    def _named(self, piece: Piece, sample: LoadedSample) -> LoadedSample:
        return replace(sample, id=self._drawn[piece.place])
