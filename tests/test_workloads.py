from __future__ import annotations

import numpy as np
import pytest

from dynapar.errors import SourceError
from dynapar.meta import IMAGE, VIDEO
from dynapar.workloads import WORKLOADS, draw

LONGEST = 8 * 16_384

DRAWN = {
    "wikipedia": (226_706, 0),
    "longdoc": (1_151_624, 0),
    "docs": (261_909, 897_900),
    "lognormal": (1_189_824, 0),
    "sft": (342_824, 0),
    "burst": (1_065_048, 0),
    "video": (471_146, 1_054_640),
    "flat": (256_850, 0),
}
"""LLM tokens and encoder tokens in all, of 256 samples with seed 3."""


@pytest.mark.parametrize("name", WORKLOADS)
def test_draws_stay_what_they_are(name: str) -> None:
    """Published figures name workloads: the draw behind a name must not move."""
    samples = draw(name, 256, seed=3, longest=LONGEST)
    found = int(samples.llm_tokens.sum()), int(samples.unit_tokens.sum())
    assert found == DRAWN[name]
    assert samples.llm_tokens.min() >= 16
    assert samples.llm_tokens.max() <= LONGEST
    assert (samples.label_tokens < samples.llm_tokens).all()


def test_modalities_follow_the_definitions() -> None:
    docs = draw("docs", 400, seed=0, longest=LONGEST)
    assert set(docs.modalities.tolist()) == {IMAGE}
    assert set(docs.unit_tokens.tolist()) == {1025}
    video = draw("video", 400, seed=0, longest=LONGEST)
    assert set(video.modalities.tolist()) == {0, IMAGE, VIDEO}
    clips = np.flatnonzero(video.modalities == VIDEO)
    frames = np.diff(video.unit_offsets)[clips]
    assert (video.llm_tokens[clips] == frames * 196 + 64).all()
    assert (video.text_tokens[clips] == 64).all()


def test_burst_has_one_longest_sample_in_128() -> None:
    tokens = draw("burst", 256, seed=0, longest=LONGEST).llm_tokens
    assert (tokens == 131_072).sum() == 2
    assert (tokens > 16_384).sum() == 2


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SourceError, match=r"workload 'cats' is unknown; expected one of wikipedia"):
        draw("cats", 1, seed=0, longest=100)
