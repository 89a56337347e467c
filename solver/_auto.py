"""`bags="auto"`: the best of free placement, of no balancing and of equal bags, by modelled time."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from solver._auto_attempt import AutoSettings, attempt_plan
from solver._bags import BagSpec
from solver._plan import BalancePlan, BalanceProblem
from solver._step_time import COMPUTE_PASSES, Links

_ATTEMPTS = (AutoSettings(),)
# What another plan must gain over free placement, which leaves more tokens at home.
_CLEARLY = 0.0045


def auto_plan(
    problem: BalanceProblem,
    links: Links,
    max_rows: float | None,
    plan_bags: Callable[[BagSpec | None], BalancePlan],
) -> BalancePlan:
    """Plan a step with nothing prescribed; global, on the host.

    Args:
        problem: the step.
        links: speeds that candidates are compared by.
        max_rows: most rows a device may hold in the attention layout, over the mean of the devices.
        plan_bags: plans the problem with a bag spec, or None for no balancing.

    Raises:
        ValueError: if no candidate keeps within max_rows.
    """
    bounds = lower_bounds(problem)
    plans = [attempt_plan(problem, settings, bounds) for settings in _ATTEMPTS]
    best, best_s = None, np.inf
    for plan in plans:
        step_s = links.step_seconds(plan).exposed
        if step_s < best_s and _rows_fit(plan, max_rows):
            best, best_s = plan, step_s
    for spec, bound_s in _alternatives(problem, links):
        if bound_s < best_s * (1 - _CLEARLY):
            plan = plan_bags(spec)
            step_s = links.step_seconds(plan).exposed
            if step_s < best_s * (1 - _CLEARLY) and _rows_fit(plan, max_rows):
                best, best_s = plan, step_s
    if best is None:
        found = min(float(plan.rows.max() / max(plan.rows.mean(), 1e-9)) for plan in plans)
        raise ValueError(
            f"balance: max_rows >= {found:.3f} for these sequences, the rows of the fullest device over the mean; got"
            f" max_rows={max_rows}. Allow more rows, or leave the longest sequence out."
        )
    return best


def _rows_fit(plan: BalancePlan, max_rows: float | None) -> bool:
    return max_rows is None or float(plan.rows.max()) <= max_rows * float(plan.rows.mean())


def lower_bounds(problem: BalanceProblem) -> tuple[float, float]:
    """Seconds of load, and of a static-shape step, that no layouts undercut: the means, tokens being whole."""
    num_devices = problem.topology.num_devices
    total = int(problem.lengths.sum())
    pairs = (
        float(np.cumsum(np.square(problem.lengths, dtype=np.float64))[-1]) if len(problem.lengths) else 0.0
    )
    attention_s = float(problem.cost.attention(1.0)) * pairs / num_devices
    most = -(-total // num_devices)
    load = float(problem.cost.linear(total / num_devices)) + attention_s
    return load, float(problem.cost.linear(most)) + attention_s


def _alternatives(problem: BalanceProblem, links: Links) -> list[tuple[BagSpec | None, float]]:
    """No balancing and equal bags, each with the seconds its step takes at least."""
    topology, cost, lengths = problem.topology, problem.cost, problem.lengths
    num_devices = topology.num_devices
    unit_s = COMPUTE_PASSES * links.unit_seconds(cost.seconds_per_flop)
    if not lengths.sum():
        return []

    def at_home(values: Float[np.ndarray, " n"]) -> float:
        return float(np.bincount(problem.home, weights=values, minlength=num_devices).max())

    kinds = (problem.text_lengths, lengths - problem.text_lengths)
    attention_s = np.asarray(cost.attention(lengths.astype(np.float64)))
    found: list[tuple[BagSpec | None, float]] = [
        (None, unit_s * (float(cost.linear(sum(map(at_home, kinds)))) + at_home(attention_s)))
    ]
    longest = int(lengths.max())
    mean_tokens, mean_attention = (
        float(lengths.sum()) / num_devices,
        float(np.cumsum(attention_s)[-1]) / num_devices,
    )
    row_s = links.row_seconds(cost.width / problem.num_heads)
    size = 1
    while size <= num_devices:
        if num_devices % size == 0:
            tokens = max(longest / size, mean_tokens)
            attention = max(float(cost.attention(longest)) / size, mean_attention)
            sent = mean_tokens * problem.num_heads * (size - 1) / size
            compute_s = unit_s * (float(cost.linear(tokens)) + attention)
            found.append((BagSpec(((size, num_devices // size),)), compute_s + sent * row_s))
        size *= 2
    return found
