"""Make one tree of samples that begin alike, so that what they share is computed once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynapar.data.samples import IGNORE, LoadedSample
from dynapar.errors import SampleError


def join_branches(samples: Sequence[LoadedSample], *, shared: int) -> LoadedSample:
    """The tree of samples whose first tokens are the same; its gradient is the sum of theirs.

    It has `shared` tokens, then the others of each sample in turn, with the position ids, media and
    targets that they have alone: a shared token has a target for each sample in which it has one.
    Encoder units of the shared media come first, then those of each sample's own.

    Args:
        samples: Two or more, each with the encoder units that this rank encodes.
        shared: Tokens that all begin with, 1 or more, media in full.

    Returns:
        A tree with the id of the first sample.

    Raises:
        SampleError: The samples differ in these tokens, or a media item lies in part among them.
    """
    first = samples[0]
    media = _shared_media(first, shared)
    for sample in samples:
        _check(first, sample, shared, media)
    lengths = [len(sample.input_ids) - shared for sample in samples]
    common = sum(item.units for item in first.media[:media])
    units, reached = {}, common
    for sample in samples:
        own = sum(item.units for item in sample.media) - common
        for number, patches in sample.units.items():
            units[number if number < common else reached + number - common] = patches
        reached += own
    more = [_targets_of_shared(sample, shared) for sample in samples[1:]]

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([parts[0][..., :shared], *(part[..., shared:] for part in parts)], -1)

    return LoadedSample(
        id=first.id,
        input_ids=joined([sample.input_ids for sample in samples]),
        targets=joined([sample.targets for sample in samples]),
        kinds=joined([sample.kinds for sample in samples]),
        positions=joined([sample.positions for sample in samples]),
        media=first.media[:media] + tuple(m for s in samples for m in s.media[media:]),
        units=units,
        tree=((shared, -1), *((length, 0) for length in lengths if length)),
        more_targets=torch.cat(more, 1),
    )


def _shared_media(sample: LoadedSample, shared: int) -> int:
    """How many of a sample's media items lie in its first tokens."""
    placeholders = int((sample.kinds[:shared] != 0).sum())
    count = 0
    for item in sample.media:
        if placeholders <= 0:
            break
        placeholders -= item.llm_tokens
        count += 1
    if placeholders:
        raise SampleError(
            f"sample {sample.id!r} shares {shared} tokens, in the middle of a media item; expected "
            "items to be shared in full or not at all. Share fewer tokens"
        )
    return count


def _check(first: LoadedSample, sample: LoadedSample, shared: int, media: int) -> None:
    differs = len(sample.input_ids) < shared or any(
        not torch.equal(a[..., :shared], b[..., :shared])
        for a, b in (
            (first.input_ids, sample.input_ids),
            (first.kinds, sample.kinds),
            (first.positions, sample.positions),
        )
    )
    if not shared >= 1 or differs or first.media[:media] != sample.media[:media]:
        raise SampleError(
            f"samples {first.id!r} and {sample.id!r} do not begin with the same {shared} tokens, "
            "positions and media; expected samples of one prefix. Check the prefix of their lines"
        )


def _targets_of_shared(sample: LoadedSample, shared: int) -> Tensor:
    rows = (sample.targets[:shared] != IGNORE).nonzero()[:, 0]
    return torch.stack([rows, sample.targets[rows]])
