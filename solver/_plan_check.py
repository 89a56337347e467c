"""Checks that a plan's layouts cover the step exactly once, on devices that exist."""

import numpy as np
from jaxtyping import Float, Int

from solver._check import instance
from solver._plan import BalancePlan, BalanceProblem
from solver._plan_measure import check_slices, plan_from_slices


def validate_plan(plan: BalancePlan) -> None:
    """Check a plan from scratch; for tests, and for plans that were built by hand or read from a file.

    Every token of every sequence is in exactly one token slice and every (head, query) in exactly one head
    slice; slices are sorted, non-empty and on devices that exist; the figures per device follow from them.

    Args:
        plan: the plan to check.

    Raises:
        TypeError: no plan.
        ValueError: the first rule that is broken, with the sequence or device.

    Example:
        >>> from dataclasses import replace
        >>> from solver import balance
        >>> plan = balance([30, 12], [0, 1], num_devices=2, bags="g2n1", num_heads=2)
        >>> validate_plan(plan)
        >>> validate_plan(replace(plan, token_slices=plan.token_slices[1:]))
        Traceback (most recent call last):
        ValueError: validate_plan: token slices cover every token exactly once; sequence 0 is not covered so.
    """
    instance("validate_plan", "plan", plan, BalancePlan, advice="Make one with balance or plan_from_slices.")
    check_slices("validate_plan", plan, plan.token_slices, plan.head_slices)
    _check_sorted("token_slices", plan.token_slices[:, [3, 0, 1]])
    _check_sorted("head_slices", plan.head_slices[:, [5, 0, 1, 3]])
    _check_tokens(plan)
    _check_heads(plan)
    _check_figures(plan)


def _check_sorted(name: str, keys: Int[np.ndarray, "slices keys"]) -> None:
    order = np.lexsort(keys.T[::-1])
    if not np.array_equal(order, np.arange(len(keys))):
        raise ValueError(f"validate_plan: {name} sorted by device, sequence, start; they are not. Sort them.")


def _check_tokens(plan: BalancePlan) -> None:
    sequence, start, stop, _ = plan.token_slices.astype(np.int64).T
    if (start >= stop).any():
        raise ValueError("validate_plan: no token slice is empty; one has start >= stop.")
    order = np.lexsort((start, sequence))
    sequence, start, stop = sequence[order], start[order], stop[order]
    first = np.r_[True, sequence[1:] != sequence[:-1]][: len(sequence)]
    last = np.r_[first[1:], True][: len(sequence)]
    expected_start = np.where(first, 0, np.r_[0, stop[:-1]][: len(sequence)])
    expected_stop = np.where(last, plan.lengths[sequence], stop)
    wrong = sequence[(start != expected_start) | (stop != expected_stop)]
    missing = np.setdiff1d(np.flatnonzero(plan.lengths), sequence)
    if len(wrong) or len(missing):
        raise ValueError(
            "validate_plan: token slices cover every token exactly once; "
            f"sequence {np.r_[wrong, missing][0]} is not covered so."
        )


def _check_heads(plan: BalancePlan) -> None:
    """Of every sequence, between heads at which slices begin or end, the slices' queries tile its length."""
    sequence, head_start, head_stop, query_start, query_stop, _ = plan.head_slices.astype(np.int64).T
    if ((head_start >= head_stop) | (query_start >= query_stop)).any():
        raise ValueError("validate_plan: no head slice is empty; one has start >= stop.")
    order = np.argsort(sequence, kind="stable")
    ends = np.searchsorted(sequence[order], np.arange(len(plan.lengths) + 1))
    for number, length in enumerate(plan.lengths.tolist()):
        mine = order[ends[number] : ends[number + 1]]
        starts = np.unique(np.r_[0, head_start[mine], head_stop[mine]]) if length else np.zeros(0, np.int64)
        heads_right = not length or (starts[-1] == plan.num_heads and starts[0] == 0)
        tiled = heads_right and all(
            _tiles(query_start[mine][held], query_stop[mine][held], length)
            for head in starts[:-1].tolist()
            for held in [(head_start[mine] <= head) & (head < head_stop[mine])]
        )
        if not tiled or (not length and len(mine)):
            raise ValueError(
                "validate_plan: head slices cover every (head, query) exactly once; "
                f"sequence {number} is not covered so."
            )


def _tiles(start: Int[np.ndarray, " n"], stop: Int[np.ndarray, " n"], length: int) -> bool:
    order = np.argsort(start)
    return np.array_equal(np.r_[start[order], length], np.r_[0, stop[order]])


def _check_figures(plan: BalancePlan) -> None:
    problem = BalanceProblem(
        plan.lengths, plan.text_lengths, plan.home, plan.num_heads, plan.topology, plan.cost
    )
    again = plan_from_slices(
        problem,
        plan.token_slices,
        plan.head_slices,
        lower_bounds=(plan.load_lower_bound, plan.step_lower_bound),
    )
    for name in (
        "tokens",
        "text_tokens",
        "attention_work",
        "load",
        "rows",
        "rows_sent",
        "rows_across_machines",
    ):
        given: Float[np.ndarray, " devices"] = getattr(plan, name)
        if not np.array_equal(given, getattr(again, name)):
            raise ValueError(
                f"validate_plan: {name} follows from the slices; it does not. Use plan_from_slices."
            )
    slack = 1 + 1e-9
    if plan.load_lower_bound > plan.load.max() * slack:
        raise ValueError("validate_plan: load_lower_bound is at most the largest load; it is larger.")
