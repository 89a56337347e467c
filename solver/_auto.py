"""`bags="auto"`: the best of free placement, of no balancing and of equal bags, by modelled time."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from jaxtyping import Num

from solver._auto_free import place_freely
from solver._auto_relabel import relabel
from solver._bags import BagSpec
from solver._plan import BalancePlan, BalanceProblem, total_of
from solver._step_time import Links

# What another plan must gain over free placement, which leaves more tokens at home; where exchanges are padded, for the
# sake of the program too: its rounds have room for every step's, so that placing steps in different ways cost 4 %.
_CLEARLY = 0.0045
_CLEARLY_PADDED = 0.03
# Planning within a machine takes the cube of its devices: 7 s for so many.
_MOST_OF_A_MACHINE = 1024


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
        ValueError: if no candidate keeps within max_rows, or for machines of too many devices.
    """
    if problem.topology.devices_per_machine > _MOST_OF_A_MACHINE:
        raise ValueError(
            f"balance: bags='auto' fills machines of at most {_MOST_OF_A_MACHINE} devices; got devices_per_machine="
            f"{problem.topology.devices_per_machine}. Give topology=Topology(num_machines, devices_per_machine), of"
            " devices between which traffic is cheap."
        )
    mean_tokens, mean_attention = _means(problem)
    most_tokens = math.ceil(mean_tokens)
    load, step = (float(problem.cost.linear(x)) + mean_attention for x in (mean_tokens, most_tokens))
    free = place_freely(problem, (load, step))
    if links.padded:
        free = relabel(problem, free)
    best = free
    least_rows = _rows_over_mean(free)
    enough = 1 - (_CLEARLY_PADDED if links.padded else _CLEARLY)
    best_s = links.price_s(free) if _rows_fit(free, max_rows) else math.inf
    for spec, bound_s in _alternatives(problem, links):
        if bound_s < best_s * enough:
            plan = plan_bags(spec)
            step_s = links.price_s(plan)
            least_rows = min(least_rows, _rows_over_mean(plan))
            if step_s < best_s * enough and _rows_fit(plan, max_rows):
                best, best_s = replace(plan, load_lower_bound=load, step_lower_bound=step), step_s
    if best_s == math.inf:
        possible = math.floor(least_rows * 1e3 + 1) / 1e3
        raise ValueError(
            f"balance: max_rows >= {possible} for these sequences, the rows of the fullest device over the mean; got"
            f" max_rows={max_rows}. Allow more rows, or leave the longest sequence out."
        )
    return best


def _rows_fit(plan: BalancePlan, max_rows: float | None) -> bool:
    return max_rows is None or float(plan.rows.max()) <= max_rows * float(plan.rows.mean())


def _rows_over_mean(plan: BalancePlan) -> float:
    """Of the fullest device."""
    return float(plan.rows.max() / max(plan.rows.mean(), 1e-300))


def _means(problem: BalanceProblem) -> tuple[float, float]:
    """Tokens and seconds of attention of a device on average, which the fullest one has at least."""
    num_devices = problem.topology.num_devices
    attention_s = np.asarray(problem.cost.attention(problem.lengths.astype(np.float64)))
    return int(problem.lengths.sum()) / num_devices, total_of(attention_s) / num_devices


def _alternatives(problem: BalanceProblem, links: Links) -> list[tuple[BagSpec | None, float]]:
    """No balancing and equal bags, each with the seconds its step takes at least."""
    cost, lengths, num_devices = problem.cost, problem.lengths, problem.topology.num_devices
    if not lengths.sum():
        return []

    def at_home(values: Num[np.ndarray, " n"]) -> float:
        return float(np.bincount(problem.home, weights=values, minlength=num_devices).max())

    tokens = at_home(problem.text_lengths) + at_home(lengths - problem.text_lengths)
    attention = at_home(np.asarray(cost.attention(lengths.astype(np.float64))))
    found: list[tuple[BagSpec | None, float]] = [(None, links.compute_seconds(cost, tokens, attention))]
    longest = int(lengths.max())
    mean_tokens, mean_attention = _means(problem)
    head_dim, of_machine = cost.width / problem.num_heads, problem.topology.devices_per_machine
    for size in _divisors(num_devices):
        tokens = max(longest / size, mean_tokens)
        attention = max(float(cost.attention(longest)) / size, mean_attention)
        # Of a device, those that go to one of the others in the bag; of shorter sequences perhaps none do.
        rows = float(lengths[lengths >= size].sum()) / num_devices * problem.num_heads / size
        bound_s = links.compute_seconds(cost, tokens, attention)
        bound_s += rows * (min(size, of_machine) - 1) * links.row_seconds(head_dim)
        bound_s += rows * max(size - of_machine, 0) * links.row_seconds(head_dim, across=True)
        found.append((BagSpec(((size, num_devices // size),)), bound_s))
    return found


def _divisors(n: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})
