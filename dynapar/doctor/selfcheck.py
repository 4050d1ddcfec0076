"""Two small runs of the real thing: a plan, and attention that two ranks share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from dynapar.doctor.finding import Finding, fail, ok, warn

LENGTHS = (52_344, 900, 1_200, 8_000, 640, 2_048, 31_000, 77) * 8
"""Tokens of the samples of the planned step."""
COMPILED_SECONDS = 10.0
"""Loading a planner that was compiled before takes about one."""
SLOW_SECONDS = 0.5
"""A planned step of this size takes milliseconds; more is no compiled planner."""


class PlannedTwice(NamedTuple):
    """What planning the same step two times came to."""

    digests: tuple[str, str]
    seconds: tuple[float, float]


def plan_twice() -> PlannedTwice:
    """Plan a step of 64 samples on 8 ranks with the shipped costs, and again; check the plan.

    Raises:
        ImportError: numba or numpy cannot be imported.
        RuntimeError: numba finds no folder to keep compiled code in.
        PlanError: The plan breaks its contract.
    """
    from dynapar.integrations.lengths import plan_lengths
    from dynapar.plan import plan_digest, validate

    digests, seconds = [], []
    for _ in range(2):
        began = time.perf_counter()
        plan = plan_lengths(LENGTHS, cluster="1x8", capacity=16_384)
        seconds.append(time.perf_counter() - began)
        validate(plan)
        digests.append(plan_digest(plan))
    return PlannedTwice((digests[0], digests[1]), (seconds[0], seconds[1]))


def check_planner(found: PlannedTwice) -> Finding:
    """Judge two plans of one step; the digest is the same on every machine of a run."""
    one, two = found.digests
    if one != two:
        return fail(
            "planner",
            f"planned the same step twice, with digests {one[:16]} and {two[:16]}; expected one",
            "do not train with this installation: its ranks would disagree. Please report it with "
            "the versions above",
        )
    first, again = found.seconds
    text = (
        f"a step of {len(LENGTHS)} samples in {first:.3g} s"
        f"{' (compiled now)' if first > COMPILED_SECONDS else ''}, then in {1000 * again:.3g} ms; "
        f"digest {one[:16]}"
    )
    if again > SLOW_SECONDS:
        return warn(
            "planner",
            f"{text}: expected milliseconds",
            "look for NUMBA_* variables, and for other work on these cores",
        )
    return ok("planner", text)


def check_attention(errors: Mapping[str, float], *, check: str, who: str) -> Finding:
    """Judge `dynapar.doctor.ring.measure` or `compare`.

    Args:
        errors: The largest relative error by dtype.
        check: What was run, such as "attention at degree 2".
        who: Ran it, such as "two gloo ranks".
    """
    from dynapar.doctor.ring import TOLERANCE

    text = ", ".join(f"{error:.1e} in {dtype}" for dtype, error in errors.items())
    bad = [dtype for dtype, error in errors.items() if not error <= TOLERANCE[dtype]]
    text = f"{who} and dense float64 attention, forward and backward: {text} apart"
    if bad:
        limits = ", ".join(f"{TOLERANCE[dtype]:g} in {dtype}" for dtype in bad)
        return fail(
            check,
            f"{text}; expected at most {limits}",
            "do not train with this installation. Please report it with the versions above",
        )
    return ok(check, text)
