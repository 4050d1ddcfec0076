"""The global batches of a configuration, loaded through its source and index as in training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from dynapar.catalog import load_model_shape
from dynapar.data.grouped import make_sampler
from dynapar.data.index import read_index
from dynapar.data.materialize import Materializer
from dynapar.data.parts import Parts
from dynapar.data.pieces import pieces_of
from dynapar.data.samples import LoadedSample
from dynapar.data.sources import open_source
from dynapar.meta import AUDIO, IMAGE, VIDEO, SampleTable
from dynapar.plan import StepPlan
from dynapar.train.config import RunConfig


class Batches:
    """Draws and loads the samples of steps; each process opens its own.

    Attributes:
        table: Metadata of all samples of the index.
    """

    def __init__(self, config: RunConfig, *, samples: int | None = None):
        """Open the configuration's data.

        Args:
            config: Of the run.
            samples: Of a global batch; None for the configuration's own number.

        Raises:
            SourceError: Source and index cannot be read, or do not fit each other or the model.
        """
        shape = load_model_shape(str(config.model))
        source = open_source(config.source)
        index = read_index(config.index)
        self.table: SampleTable = index.table
        self._materializer = Materializer(shape, source, index)
        self._sampler = make_sampler(
            index.table,
            group_by=config.batch.group_by,
            global_batch=samples or config.batch.samples,
            seed=config.seed,
            block=config.batch.block,
        )

    def rows(self, step: int) -> tuple[int, ...]:
        """Rows of the index that are the step's global batch."""
        return tuple(int(row) for row in self._sampler.rows(step))

    def draw(self, rows: Sequence[int]) -> SampleTable:
        """These rows as one step's table, in order."""
        return self.table.draw(np.array(rows, np.int64))

    def whole(self, row: int) -> LoadedSample:
        """A sample with all its encoder units."""
        units = len(self.table.units(row))
        return self._materializer.load(row, units=frozenset(range(units)))

    def of_rank(
        self,
        plan: StepPlan,
        rows: Sequence[int],
        rank: int,
        *,
        stubs: Mapping[int, str] = MappingProxyType({}),
    ) -> dict[int, LoadedSample]:
        """What a rank's microbatches hold, by row of the plan, with the units that it encodes.

        Args:
            plan: Of the step.
            rows: Of the index, of the step's samples as drawn.
            rank: The rank.
            stubs: Rows of the index that could not be loaded, and why. A rank that decodes no
                media of such a sample would not notice.
        """
        drawn = self.draw(rows).ids
        parts = Parts(
            self._materializer,
            plan,
            pieces_of(plan, rank, drawn),
            rows=np.array(rows, np.int64),
            drawn=drawn,
        )
        parts.make_stubs([name for name, row in zip(drawn, rows, strict=True) if row in stubs])
        return parts.samples()


def modalities(table: SampleTable) -> dict[str, int]:
    """Samples by what they hold, such as "text", "image" or "image + video"."""
    names = {IMAGE: "image", VIDEO: "video", AUDIO: "audio"}
    counts = Counter(
        " + ".join(name for bit, name in names.items() if int(held) & bit) or "text"
        for held in table.modalities
    )
    return dict(sorted(counts.items()))
