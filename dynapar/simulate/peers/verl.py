"""verl's balancing by `get_seqlen_balanced_partitions`, run as it is in the installed verl.

A static layout: one degree for the whole run (verl's sequence parallel size), samples dealt to the
rings of that degree, and within each ring to microbatches, both by Karmarkar-Karp on verl's own
estimate of work (24,576 tokens + tokens^2). What stands around the two calls is written anew from
how verl 0.9.1 makes them, and gives the benefit of the doubt:

- It sees LLM tokens alone, as in use. Encoder units are then placed by our own placement (`judge`).
- The degree is the one, of those that divide the cluster and hold the longest sample, at which the
  steps together are shortest here: what a user would reach who tried them all.
- Rings get equally many samples, as in its trainers; a batch that does not divide is a failure.
- All rings run equally many microbatches: the least number that holds their tokens, one more as
  long as a microbatch of any ring is above the capacity (verl counts packed tokens divided by the
  degree; here they are counted as they are cut, so that rounding alone makes no plan a failure).
- The k-th microbatches of all rings are a wave; each ring's largest stand in the middle, as there.

verl as a whole does not import without ray and more; the one module that is needed is loaded from
its file, with stand-ins for the four names that it imports from the rest and that are not called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np

from dynapar.packing.moldable import shared
from dynapar.simulate.peers.request import (
    PeerError,
    PeerMissingError,
    Piece,
    Plan,
    Planner,
    Request,
)

DISTRIBUTION, VERSION = "verl", "0.9.1"
"""What is installed, and the version whose trainers the notes above describe."""
MODULE = "verl/utils/seqlen_balancing.py"
STAND_INS = {
    "verl": (),
    "verl.utils": ("tensordict_utils",),
    "verl.protocol": ("DataProto",),
    "verl.utils.tensordict_utils": (),
    "verl.utils.device": ("get_device_name",),
}
"""Modules that the one loaded imports, and the names that it takes from them."""

Partition = Callable[[Sequence[int], int, bool], list[list[int]]]
"""(work, parts, whether they get equally many) -> the items of each part."""


def load() -> Planner:
    """Load the module.

    Raises:
        PeerMissingError: verl is not installed, or has no such function.
    """
    try:
        path = Path(str(distribution(DISTRIBUTION).locate_file(MODULE)))
    except PackageNotFoundError:
        raise PeerMissingError(
            f"verl is not installed; pip install --no-deps {DISTRIBUTION}=={VERSION}"
        ) from None
    for name, attributes in STAND_INS.items():
        stand_in = ModuleType(name)
        stand_in.__path__ = []
        for attribute in attributes:
            setattr(stand_in, attribute, None)
        sys.modules[name] = stand_in
    spec = spec_from_file_location("verl.utils.seqlen_balancing", path)
    if spec is None or spec.loader is None or not path.exists():
        raise PeerMissingError(
            f"the installed verl has no {MODULE}; pip install --no-deps {DISTRIBUTION}=={VERSION}"
        )
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    partition, workload = module.get_seqlen_balanced_partitions, module.calculate_workload

    def planner(request: Request) -> Plan:
        # Python integers: 24,576 tokens + tokens^2 of the longest sample stays exact.
        work = [int(workload(tokens)) for tokens in request.tokens.tolist()]
        return deal(request, work, partition)

    return planner


def deal(request: Request, work: Sequence[int], partition: Partition) -> Plan:
    """Make the calls that verl's trainers make.

    Args:
        request: The step; `degree` divides the ranks.
        work: verl's estimate for each sample.
        partition: verl's `get_seqlen_balanced_partitions`.

    Raises:
        PeerError: The samples do not divide among the rings, or no number of microbatches fits.
    """
    degree, count = request.degree, len(work)
    rings = request.ranks // degree
    if count < rings or count % rings:
        raise PeerError(
            f"{count} samples do not divide among {rings} rings, which verl deals equally many"
        )
    shares = np.array([shared(tokens, degree) for tokens in request.tokens.tolist()])
    dealt = partition(work, rings, True)
    fullest = max(int(request.tokens[rows].sum()) for rows in dealt)
    microbatches = max(1, -(-fullest // (request.capacity * degree)))
    while microbatches <= count // rings:
        queues = [
            [
                [rows[k] for k in part]
                for part in partition([work[row] for row in rows], microbatches, False)
            ]
            for rows in dealt
        ]
        if all(shares[part].sum() <= request.capacity for queue in queues for part in queue):
            return _pieces(queues, work, degree)
        microbatches += 1
    raise PeerError(
        f"no number of microbatches up to {count // rings}, one for each sample of a ring, keeps "
        f"within capacity {request.capacity:,} at degree {degree}"
    )


def _pieces(queues: Sequence[list[list[int]]], work: Sequence[int], degree: int) -> Plan:
    """The k-th microbatches of all rings as wave k, smaller ones at both ends."""
    plan: Plan = []
    for ring, queue in enumerate(queues):
        first = ring * degree
        queue.sort(key=lambda rows: (sum(work[row] for row in rows), rows[0]), reverse=True)
        ranks = tuple(range(first, first + degree))
        for wave, rows in enumerate(queue[::2][::-1] + queue[1::2]):
            plan.append(Piece(wave, ranks, tuple(rows)))
    return sorted(plan)
