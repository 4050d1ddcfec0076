from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dynapar.costs import coefficients, load_costs
from dynapar.packing.deal import first_fit, gather
from dynapar.packing.moldable import Limits, dealt_tokens, describe, fits, shared

COSTS = coefficients(load_costs(None), ranks_per_node=8)
LIMITS = Limits(
    ranks=8,
    node=8,
    grain=4,
    degrees=np.arange(1, 9),
    largest=8,
    pod=8,
    aligned=False,
    capacity=1000,
    encoder_capacity=1500,
)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_samples_are_gathered_in_order(bins: list[int]) -> None:
    order = np.arange(len(bins))[::-1].copy()
    offsets, rows = gather(np.array(bins), order, 5)
    sets = [rows[a:b].tolist() for a, b in pairwise(offsets.tolist())]
    wanted = [[i for i in order.tolist() if bins[i] == b] for b in range(5)]
    assert sets == [rows for rows in wanted if rows]


@given(
    st.lists(
        st.tuples(st.integers(1, 900), st.integers(0, 900), st.integers(0, 2)),
        min_size=1,
        max_size=16,
    ),
    st.integers(1, 4),
)
def test_each_sample_goes_to_its_sets_first_microbatch_with_room(
    samples: list[tuple[int, int, int]], degree: int
) -> None:
    tokens = np.array([each[0] for each in samples])
    encoded = [each[1] for each in samples]
    offsets = np.cumsum([0, *(size > 0 for size in encoded)], dtype=np.int64)
    jobs = describe(
        tokens, 1.0 * tokens, offsets, np.array([e for e in encoded if e], np.int64), COSTS
    )
    assert all(fits(jobs, i, degree, LIMITS) for i in range(len(samples)))
    begins, rows = gather(np.array([each[2] for each in samples]), np.arange(len(samples)), 3)
    parts, members, owner = first_fit(begins, rows, degree, jobs, LIMITS)
    found = [
        (int(owner[m]), sorted(members[parts[m] : parts[m + 1]].tolist()))
        for m in range(len(parts) - 1)
    ]
    wanted: list[tuple[int, list[int]]] = []
    for k in range(len(begins) - 1):
        own: list[list[int]] = []
        for i in sorted(rows[begins[k] : begins[k + 1]].tolist(), key=lambda i: -int(tokens[i])):
            for part in own:
                together = [*part, i]
                units = [encoded[j] for j in together if encoded[j]]
                dealt = dealt_tokens(sum(units), max(units, default=0), len(units), degree)
                held = sum(shared(int(tokens[j]), degree) for j in together)
                if held <= LIMITS.capacity and dealt <= LIMITS.encoder_capacity:
                    part.append(i)
                    break
            else:
                own.append([i])
        wanted += [(k, sorted(part)) for part in own]
    assert found == wanted
