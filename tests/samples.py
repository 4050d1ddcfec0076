"""Tables of samples for tests that plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynapar.meta import IMAGE, SampleTable


def table(lengths: Sequence[int], units: Sequence[Sequence[int]] | None = None) -> SampleTable:
    """Samples "s0", "s1", ... of these LLM tokens and encoder units."""
    own = units if units is not None else [[]] * len(lengths)
    tokens = np.array(lengths, np.int64)
    text = np.array(
        [n if not u else (n + 1) // 2 for n, u in zip(lengths, own, strict=True)], np.int64
    )
    return SampleTable(
        ids=tuple(f"s{i}" for i in range(len(lengths))),
        llm_tokens=tokens,
        text_tokens=text,
        label_tokens=np.maximum(text - 1, 0),
        modalities=np.array([IMAGE if u else 0 for u in own], np.uint8),
        unit_offsets=np.cumsum([0, *map(len, own)]).astype(np.int64),
        unit_tokens=np.array([size for u in own for size in u], np.int64),
    )
