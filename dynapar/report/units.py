"""Write figures for people: few digits, with their unit."""

from __future__ import annotations

from collections.abc import Sequence


def seconds(value: float) -> str:
    """A time.

    >>> [seconds(value) for value in (0.0, 0.000012, 0.0123, 2.4538, 93.0, 4000.0)]
    ['0 s', '0.012 ms', '12.3 ms', '2.45 s', '93 s', '66.7 min']
    """
    if value >= 600:
        return f"{value / 60:,.1f} min"
    if value >= 0.1 or value <= 0:
        return f"{value:.3g} s"
    return f"{1000 * value:.3g} ms"


def percent(share: float) -> str:
    """A share.

    >>> [percent(value) for value in (1e-9, 0.00312, 0.2237, 1.5)]
    ['0 %', '0.31 %', '22.4 %', '150 %']
    """
    value = 100 * share
    if abs(value) < 0.005:
        return "0 %"
    if abs(value) < 1:
        return f"{value:.2g} %"
    return f"{value:.3g} %" if abs(value) < 1000 else f"{value:,.0f} %"


def times(factor: float) -> str:
    """A ratio.

    >>> [times(value) for value in (1.0, 1.0345, 12.345, 250.0)]
    ['1.00', '1.03', '12.3', '250']
    """
    return f"{factor:.2f}" if factor < 10 else f"{factor:.3g}"


def count(value: float) -> str:
    """A number of things.

    >>> [count(value) for value in (7, 73_564, 407_468, 12_345_678, 3.2e9)]
    ['7', '73,564', '407 k', '12.3 M', '3.2 G']
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e5, "k")):
        if value >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g} {letter}"
    return f"{value:,.0f}"


def plural(amount: int, thing: str) -> str:
    """A number of things, with their name.

    >>> plural(1, "step"), plural(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{amount:,} {thing}{'' if amount == 1 else 's'}"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs joined.

    >>> ranges([1, 2, 3, 8, 12, 13])
    '1-3, 8, 12-13'
    """
    parts: list[list[int]] = []
    for value in numbers:
        if parts and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def longest_share(samples: int) -> str:
    """Whose tokens `DataMix.top_share` counts.

    >>> longest_share(24), longest_share(288)
    ('the longest of the 24 samples', 'the longest 1 % of the samples')
    """
    few = samples < 200
    return f"the longest of the {samples:,} samples" if few else "the longest 1 % of the samples"
