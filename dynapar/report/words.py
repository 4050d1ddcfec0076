"""Say what a report shows in plain sentences, the number first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import NamedTuple

from dynapar.report.model import Compared, LayoutFigures, Measured, PlannedStep, Report
from dynapar.report.units import count, longest_share, percent, plural, ranges, seconds, times


class Sentence(NamedTuple):
    """A figure and what it says."""

    figure: str
    text: str


def in_short(report: Report) -> list[Sentence]:
    """What the report shows, most important first."""
    found = [_what(report), _gap(report)]
    if report.compared is not None:
        found += _gains(report, report.compared)
    found += _degrees(report)
    if report.measured is not None:
        found += _measured(report.measured)
    return [*found, *_data(report)]


def _what(report: Report) -> Sentence:
    setting, steps = report.settings[0], report.steps
    budget = f" in a budget of {setting.budget / 1e9:.3g} GB" if setting.budget else ""
    media = any(step.encoder_tokens for step in steps)
    encoded = f" and {setting.encoder_capacity:,} encoder tokens" if media else ""
    samples = sorted({step.samples for step in steps})
    each = f"{samples[0]:,}" if len(samples) == 1 else f"{samples[0]:,} to {samples[-1]:,}"
    nodes = -(-setting.ranks // setting.ranks_per_node)
    return Sentence(
        plural(len(steps), "step"),
        f"of {each} samples and {count(fmean(step.tokens for step in steps))} tokens on average, "
        f"planned for {plural(setting.ranks, 'rank')} ({nodes} x {setting.ranks_per_node}), sync "
        f'"{setting.sync}", capacity {setting.capacity:,} tokens{encoded} a rank{budget}.',
    )


def of_equal_ranks(steps: Sequence[PlannedStep]) -> Sequence[PlannedStep]:
    """The steps whose makespans and gaps say something; all where there is none."""
    return [step for step in steps if not step.dealt] or steps


def _gap(report: Report) -> Sentence:
    steps = of_equal_ranks(report.steps)
    worst = max(steps, key=lambda step: step.gap)
    optimal = sum(step.optimal for step in steps)
    proven = f" {plural(optimal, 'step')} proven optimal." if optimal else ""
    return Sentence(
        percent(fmean(step.gap for step in steps)),
        f"above the proven lower bound is the mean makespan ({percent(worst.gap)} in step "
        f"{worst.step}, the worst): no layout of these samples under the same costs can gain more "
        f"than that.{proven}",
    )


def _gains(report: Report, compared: Compared) -> Iterator[Sentence]:
    by_name = {layout.name: layout for layout in compared.layouts}
    among = (
        f"over {plural(len(compared.steps), 'step')}"
        if len(compared.steps) == len(report.steps)
        else f"over {len(compared.steps):,} of {plural(len(report.steps), 'step')}"
    )
    if static := by_name.get("static"):
        yield Sentence(
            f"{times(static.gain)} times",
            f"dynapar's makespan is what the best static degree ({static.degrees[0]}) takes in "
            f"the median step, {times(static.worst_gain)} times in the step where switching gains "
            f"least ({among}).",
        )
    if padded := by_name.get("padded"):
        yield Sentence(
            f"{times(padded.gain)} times",
            f"dynapar's makespan is what padded, length-grouped batches at degree "
            f"{padded.degrees[0]} take in the median step, {times(padded.worst_gain)} times in the "
            f"step where least is gained; "
            f"{percent(padded.padding)} of the tokens that they compute are padding. They are not "
            f"tuned; much of this gain is also had by tuning them.",
        )
    ours = by_name["dynapar"]
    others = ", ".join(
        f"{layout.name}: {percent(layout.shares['idle'])}" for layout in compared.layouts[1:]
    )
    yield Sentence(
        percent(ours.shares["idle"]),
        f"of the ranks' time is predicted to be idle{_where_idle(ours)}"
        f"{f' ({others})' if others else ''}.",
    )
    origin = "measured costs" if compared.measured else "reference costs, not measured here"
    yield Sentence(
        f"{count(ours.tokens_per_second)} tokens/s",
        f'are predicted, closing passes included, under costs "{compared.costs}" ({origin}).',
    )


def _where_idle(layout: LayoutFigures) -> str:
    """In which module's part the ranks wait, where they meet in every module."""
    if "idle in encoder" not in layout.shares:
        return ""
    return (
        f": {percent(layout.shares['idle in encoder'])} in the encoders' part of the waves, "
        f"{percent(layout.shares['idle in llm'])} in the LLM's"
    )


def _degrees(report: Report) -> Iterator[Sentence]:
    same = sum(len(step.samples_by_degree) == 1 for step in report.steps)
    used = sorted({degree for step in report.steps for degree in step.samples_by_degree})
    if len(used) == 1:
        yield Sentence(f"Degree {used[0]}", "is that of all samples, in all steps.")
        return
    yield Sentence(
        f"{same:,} of {plural(len(report.steps), 'step')}",
        f"run all samples at one degree, because nothing mixed was shorter; over the whole run "
        f"degrees {ranges(used)} are used."
        if same
        else f"run at one degree: mixing degrees was always shorter. Degrees {ranges(used)} are "
        f"used.",
    )


def _measured(measured: Measured) -> Iterator[Sentence]:
    middle = median(step.tokens_per_second for step in measured.steps)
    yield Sentence(
        f"{count(middle)} tokens/s",
        f"were measured in the median of {plural(len(measured.steps), 'step')}; the slowest step "
        f"took {seconds(max(step.seconds for step in measured.steps))}, the fastest "
        f"{seconds(min(step.seconds for step in measured.steps))}.",
    )
    yield Sentence(
        f"{times(measured.scale)} times",
        f"its predicted makespan is what the median step took. Beside this common factor, which "
        f"changes no layout, steps stray by {percent(measured.step_error)} and microbatches by "
        f"{percent(measured.microbatch_error)} in the median.",
    )
    if measured.cpu:
        yield Sentence(
            f"{times(measured.microbatch_scale)} times",
            "its prediction is the CPU time of a rank in the median microbatch. What a step takes "
            "beyond that is waiting: for other ranks, for cores that ranks share, for the device.",
        )
    slow = sorted(
        (rank for rank in measured.ranks if rank.straggler), key=lambda rank: -rank.factor
    )
    if slow:
        names = ", ".join(f"rank {rank.rank} ({times(rank.factor)} times)" for rank in slow[:5])
        more = f" and {len(slow) - 5} more" if len(slow) > 5 else ""
        yield Sentence(
            plural(len(slow), "straggler"),
            f"took longer than the other ranks for the same work: {names}{more}.",
        )
    elif any(rank.microbatches for rank in measured.ranks):
        yield Sentence(
            "No straggler",
            "was found: no rank is slower for the same work than the others by more than the noise "
            "and 10 %.",
        )
    else:
        yield Sentence(
            "No rank", "can be told from the others by its speed: none ran a microbatch alone."
        )


def _data(report: Report) -> Iterator[Sentence]:
    mix = report.mix
    if not mix.samples:
        return
    longest = mix.longest[0]
    few = mix.samples < 200
    yield Sentence(
        percent(mix.top_share),
        f"of all tokens are in {longest_share(mix.samples)}. {'It' if few else 'The longest'} has "
        f"{longest.tokens:,} tokens ({longest.tokens / mix.median:,.0f} times the median) and was "
        f"shared by {plural(longest.degree, 'rank')}.",
    )
    encoder = sum(kind.encoder_seconds for kind in mix.modalities)
    whole = encoder + sum(kind.llm_seconds for kind in mix.modalities)
    if encoder:
        yield Sentence(
            percent(encoder / whole),
            "of all predicted work is in the encoders, the rest in the LLM.",
        )


def cards(report: Report) -> list[tuple[str, str]]:
    """The figures for the head of the page: (figure, name)."""
    gap = fmean(step.gap for step in of_equal_ranks(report.steps))
    found = [(percent(gap), "mean gap to the bound")]
    if report.compared is not None:
        names = {"static": "gain over static", "padded": "gain over padded"}
        found += [
            (f"{times(layout.gain)}x", names[layout.name])
            for layout in report.compared.layouts
            if layout.name in names
        ]
        found.append((percent(report.compared.layouts[0].shares["idle"]), "predicted idle"))
    if report.measured is None:
        if report.compared is not None:
            rate = report.compared.layouts[0].tokens_per_second
            found.append((count(rate), "tokens/s, predicted"))
        return found
    middle = median(step.tokens_per_second for step in report.measured.steps)
    slow = sum(rank.straggler for rank in report.measured.ranks)
    return [
        *found,
        (count(middle), "tokens/s, measured"),
        (f"{times(report.measured.scale)}x", "measured over predicted"),
        (str(slow) if slow else "none", "stragglers"),
    ]


def pricing(report: Report) -> str:
    """Where the times come from, and how far they can be trusted."""
    named = report.settings[0].costs
    called = f'"{named}"' if named else "without a name"
    if report.compared is None:
        return f"Times were predicted with costs {called}." + _paced(report.measured)
    compared = report.compared
    origin = (
        "measured on the hardware that they are used for"
        if compared.measured
        else "reference figures, measured nowhere; compare plans, not clocks"
    )
    text = f"Times were predicted with costs {called}"
    if named == compared.costs:
        text += f": {origin}."
    else:
        text += f'; what is compared here is priced with "{compared.costs}": {origin}.'
    if compared.difference > 1e-9:
        text += (
            f" These are not quite those of the plans, whose own makespans differ by up to "
            f"{percent(compared.difference)} from their price here."
        )
    return text + _paced(report.measured)


def _paced(measured: Measured | None) -> str:
    """What must be known of figures of plans that were made for ranks of unequal speed."""
    steps = measured.steps if measured is not None else ()
    slow = [step.least_speed for step in steps if step.least_speed < 1]
    if not slow:
        return ""
    left_out = (
        " and count neither in the mean gap nor in the comparison with static and padded"
        if len(slow) < len(steps)
        else ""
    )
    return (
        f" {plural(len(slow), 'step')} of {len(steps):,} were dealt for ranks of unequal speed "
        f"(the slowest at {times(min(slow))}){left_out}: their makespans are those of equally fast "
        f"ranks, for which other layouts would be shorter."
    )
