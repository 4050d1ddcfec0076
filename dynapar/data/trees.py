"""Join samples that share a prefix into one tree, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from dynapar.data.samples import IGNORE, LoadedSample, MediaShape
from dynapar.errors import SampleError


def join_members(
    name: str, members: Sequence[LoadedSample], *, prefix_tokens: int, prefix_units: int
) -> LoadedSample:
    """The tree of samples that begin alike: the prefix, then each member's own branch.

    Branches keep the positions that they have in their members. Each member keeps its own targets:
    one in the prefix counts once for each member, and the prefix's last token, whose next token is
    another one in each branch, has a target of each. So loss and gradient are the members', added.

    Args:
        name: Of the tree.
        members: Two or more; with the patches of the encoder units that this rank encodes, those of
            the prefix in any of them.
        prefix_tokens: Tokens that they share, fewer than each has.
        prefix_units: Encoder units that they share, the first of each.

    Raises:
        SampleError: Members that are no stubs differ in the prefix; both are named.
    """
    whole = [member for member in members if not member.stub]
    first = whole[0] if whole else members[0]
    for other in whole[1:]:
        if fault := prefix_fault(first, other, prefix_tokens):
            raise SampleError(fault)
    media = _shared_media(first.media, prefix_units)
    units = {
        unit: patches
        for member in (*members, first)
        for unit, patches in member.units.items()
        if unit < prefix_units
    }
    count = prefix_units
    for member in members:
        own = sum(item.units for item in member.media) - prefix_units
        units |= {
            count + unit - prefix_units: patches
            for unit, patches in member.units.items()
            if unit >= prefix_units
        }
        count += own
    branches = [len(member.input_ids) - prefix_tokens for member in members]
    return LoadedSample(
        id=name,
        input_ids=_joined(first.input_ids, [m.input_ids for m in members], prefix_tokens),
        targets=_targets([m.targets for m in members], prefix_tokens),
        kinds=_joined(first.kinds, [m.kinds for m in members], prefix_tokens),
        positions=_joined(first.positions, [m.positions for m in members], prefix_tokens),
        media=(*media, *(item for m in members for item in m.media[len(media) :])),
        units=units,
        tree=((prefix_tokens, -1), *((branch, 0) for branch in branches)),
        stub="" if whole else members[0].stub,
    )


def prefix_fault(first: LoadedSample, other: LoadedSample, tokens: int) -> str:
    """Why two samples do not share their first so many tokens; empty where they do."""
    for what in ("input_ids", "kinds", "positions"):
        one, two = getattr(first, what)[..., :tokens], getattr(other, what)[..., :tokens]
        if not torch.equal(one, two):
            place = int((one != two).reshape(-1, tokens).any(0).nonzero()[0])
            return (
                f"samples {first.id!r} and {other.id!r} share a prefix of {tokens} tokens, and "
                f"their {what} differ at token {place}: {one[..., place].tolist()} and "
                f"{two[..., place].tolist()}; expected the same tokens and media. Shorten the "
                f"prefix, or give one of them another prefix id"
            )
    return ""


def _shared_media(media: Sequence[MediaShape], units: int) -> Sequence[MediaShape]:
    """The first items, with so many units together."""
    ends = list(accumulate(item.units for item in media))
    return media[: sum(1 for end in ends if end <= units)]


def _joined(prefix: Tensor, members: Sequence[Tensor], tokens: int) -> Tensor:
    return torch.cat([prefix[..., :tokens], *(member[..., tokens:] for member in members)], -1)


def _targets(members: Sequence[Tensor], tokens: int) -> Tensor:
    """(k, tokens of the tree): all members' targets in the prefix, in the fewest rows k."""
    own = torch.stack([member[:tokens] for member in members])
    order = (own == IGNORE).to(torch.int8).argsort(dim=0, stable=True)
    own = own.gather(0, order)
    rows = max(1, int((own != IGNORE).sum(0).max()))
    branches = torch.cat([member[tokens:] for member in members])[None]
    return torch.cat(
        [own[:rows], functional.pad(branches, (0, 0, 0, rows - 1), value=IGNORE)], dim=1
    )
