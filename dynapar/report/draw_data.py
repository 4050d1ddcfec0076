"""Draw what the steps are made of: lengths, kinds of samples, encoder against LLM work."""

from __future__ import annotations

from dynapar.report.model import MODALITIES, DataMix
from dynapar.report.plot import (
    Axis,
    Bar,
    Part,
    bars,
    dot,
    figure,
    frame,
    legend,
    linear,
    logarithmic,
    pairs,
    path,
    rect,
    table,
    thinned,
)
from dynapar.report.units import count, longest_share, percent, plural, seconds

_LENGTHS = [(2.0**k, f"{2**k:,}" if k < 10 else f"{2 ** (k - 10):,}k") for k in range(0, 41, 2)]
_SECONDS = [
    (1e-6, "1 us"), (1e-5, "10 us"), (1e-4, "0.1 ms"), (1e-3, "1 ms"), (1e-2, "10 ms"),
    (1e-1, "0.1 s"), (1.0, "1 s"), (10.0, "10 s"), (100.0, "100 s"), (1e3, "1,000 s"),
]  # fmt: skip
NONE_AT = 0.05
"""Height at which samples without encoder work are drawn."""


def data_figures(mix: DataMix) -> list[str]:
    """The charts of the data; none without samples."""
    if not mix.samples:
        return []
    kinds = [(f"m-{kind.name}", kind.name) for kind in mix.modalities]
    figures = [
        figure(
            "How long the samples are",
            "Samples by length, on a logarithmic axis with two bars an octave. A sample that "
            "several steps draw counts each time.",
            legend(kinds) + _histogram(mix, tokens=False),
            name="lengths",
        ),
        figure(
            "Where the tokens are",
            f"The same bars with the tokens that their samples hold. {percent(mix.top_share)} of "
            f"all tokens are in {longest_share(mix.samples)}; the median sample has "
            f"{mix.median:,}.",
            legend(kinds) + _histogram(mix, tokens=True),
        ),
        figure(
            "Encoder against LLM work, by kind",
            "Predicted seconds of one rank for all samples of a kind: in the LLM at degree 1, and "
            "in the encoders. Balance in tokens is no balance in time where the two differ from "
            "kind to kind.",
            legend([("u-llm", "LLM"), ("u-encoder", "encoders")]) + _work_bars(mix),
        ),
        figure(
            "Encoder against LLM work, sample by sample",
            "Each dot stands for the samples whose work is alike, and is larger the more they are. "
            "Above the line a sample costs more in the encoders than in the LLM; the bottom row "
            "has no encoder work.",
            legend(kinds) + _work_dots(mix),
        ),
    ]
    named = figure(
        "The longest samples",
        "Degree: how many ranks share the sample by context parallelism in its step.",
        _longest(mix),
    )
    return [*pairs(figures), named]


def _histogram(mix: DataMix, *, tokens: bool) -> str:
    low, high = mix.bins[0].low, mix.bins[-1].high
    marks = [mark for mark in _LENGTHS if low <= mark[0] <= high]
    x = logarithmic(low, high, "tokens of a sample", thinned(marks, 8))
    whole = mix.tokens if tokens else mix.samples
    most = max(sum(row.tokens if tokens else row.samples) for row in mix.bins) / whole
    y = linear(100 * most, f"% of {'tokens' if tokens else 'samples'}", marks=4)
    shapes = []
    for row in mix.bins:
        base = 0.0
        held = row.tokens if tokens else row.samples
        for name, amount in zip(MODALITIES, held, strict=True):
            if amount:
                top = base + 100 * amount / whole
                tip = (
                    f"{row.low:,} to {row.high - 1:,} tokens, {name}\n"
                    f"{plural(amount, 'token' if tokens else 'sample')} "
                    f"({percent(amount / whole)})"
                )
                shapes.append(
                    rect(x.at(row.low), x.at(row.high), y.at(base), y.at(top), f"m-{name} gap", tip)
                )
                base = top
    what = "tokens" if tokens else "samples"
    return frame(shapes, x, y, height=170, label=f"Histogram of {what} by length and kind")


def _work_bars(mix: DataMix) -> str:
    most = max(kind.llm_seconds + kind.encoder_seconds for kind in mix.modalities) or 1.0
    rows = []
    for kind in mix.modalities:
        whole = kind.llm_seconds + kind.encoder_seconds
        share = percent(kind.encoder_seconds / whole) if whole else "0 %"
        rows.append(
            Bar(
                name=f"{kind.name} ({count(kind.samples)})",
                figure=f"{share} encoders",
                parts=(
                    Part(
                        share=kind.llm_seconds / most,
                        kind="u-llm",
                        tip=f"{kind.name}: {seconds(kind.llm_seconds)} of rank time in the LLM\n"
                        f"{plural(kind.samples, 'sample')}, {count(kind.tokens)} tokens, longest "
                        f"{kind.longest:,}",
                    ),
                    Part(
                        share=kind.encoder_seconds / most,
                        kind="u-encoder",
                        tip=f"{kind.name}: {seconds(kind.encoder_seconds)} of rank time in the "
                        f"encoders\n{count(kind.encoder_tokens)} encoder tokens",
                    ),
                ),
            )
        )
    return bars(rows)


def _work_dots(mix: DataMix) -> str:
    x = _work_axis([cell.x for cell in mix.work], "LLM work of a sample")
    encoded = [cell.y for cell in mix.work if cell.y > 0]
    if encoded:
        y = _work_axis(encoded, "encoder work")
    else:
        y = Axis(low=0.0, high=1.0, title="encoder work", marks=())
    most = max(cell.amount for cell in mix.work)
    shapes = []
    if encoded:
        low, high = max(x.low, y.low), min(x.high, y.high)
        if low < high:
            ends = [(x.at(value), _raised(y, value)) for value in (low, high)]
            shapes.append(path(ends, "l-equal"))
    for cell in sorted(mix.work, key=lambda cell: -cell.amount):
        encoder = f"{seconds(cell.y)} in the encoders" if cell.y else "no encoder work"
        shapes.append(
            dot(
                x.at(cell.x) + 0.006 * (MODALITIES.index(cell.kind) - 1.5),
                _raised(y, cell.y) if cell.y else NONE_AT,
                f"m-{cell.kind}",
                width=4 + 16 * (cell.amount / most) ** 0.5,
                tip=f"{plural(cell.amount, 'sample')}, {cell.kind}\nabout {seconds(cell.x)} in the "
                f"LLM, {encoder}",
            )
        )
    marks = ((y.low, "none"), *y.marks)
    shown = Axis(low=0.0, high=1.0, title=y.title, marks=tuple(
        (NONE_AT if text == "none" else _raised(y, value), text) for value, text in marks
    ))  # fmt: skip
    return frame(shapes, x, shown, height=230, label="Encoder work against LLM work of the samples")


def _raised(y: Axis, value: float) -> float:
    """Above the row of samples without encoder work."""
    return 0.14 + 0.82 * y.at(value)


def _work_axis(values: list[float], title: str) -> Axis:
    low, high = min(values) / 2, max(values) * 2
    marks = [mark for mark in _SECONDS if low <= mark[0] <= high]
    return logarithmic(low, high, title, thinned(marks, 5))


def _longest(mix: DataMix) -> str:
    rows = [
        (
            sample.id,
            str(sample.step),
            f"{sample.tokens:,}",
            f"{sample.encoder_tokens:,}",
            sample.modality,
            str(sample.degree),
        )
        for sample in mix.longest
    ]
    return table(("id", "step", "tokens", "encoder tokens", "kind", "degree"), rows)
