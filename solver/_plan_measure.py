"""What a pair of layouts costs every device: tokens, attention work and the rows that move between them."""

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray

from solver._plan import BalancePlan, BalanceProblem


def plan_from_slices(
    problem: BalanceProblem,
    token_slices: Int[np.ndarray, "token_slices 4"],
    head_slices: Int[np.ndarray, "head_slices 6"],
    *,
    lower_bounds: tuple[float, float],
) -> BalancePlan:
    """Make a plan from its layouts: measures every device; global, on the host.

    Args:
        problem: what the layouts are for.
        token_slices: token layout, rows (sequence, start, stop, device) sorted by device, sequence, start.
        head_slices: attention layout, rows (sequence, head_start, head_stop, query_start, query_stop, device) sorted by
            device, sequence, head_start, query_start.
        lower_bounds: seconds below which no plan under the same rules has its load and its static-shape step.

    Returns:
        The plan. That its slices cover the step is not checked: `validate_plan` does.

    Raises:
        ValueError: slices that are no integers, of another number of columns, or of sequences or devices that are not
            there.

    Example:
        Two tokens on device 0 whose only head is attended on device 1:

        >>> from solver import CostModel, Topology, validate_plan
        >>> lengths = np.array([2])
        >>> problem = BalanceProblem(lengths, 0 * lengths, 0 * lengths, 1, Topology(1, 2), CostModel(64, 0.4))
        >>> plan = plan_from_slices(
        ...     problem, np.array([[0, 0, 2, 0]]), np.array([[0, 0, 1, 0, 2, 1]]), lower_bounds=(0.0, 0.0)
        ... )
        >>> validate_plan(plan)
        >>> plan.tokens.tolist(), plan.rows_sent.tolist()
        ([2, 0], [2, 0])
    """
    num_devices = problem.topology.num_devices
    check_slices("plan_from_slices", problem, token_slices, head_slices)
    token_columns, head_columns = _columns(token_slices), _columns(head_slices)
    sequence, start, stop, device = token_columns
    text = problem.text_lengths[sequence]
    num_text = np.minimum(stop, text) - np.minimum(start, text)
    tokens = _sum_by(device, stop - start, num_devices)
    attention_work = _attention_work(problem, head_columns)
    rows, rows_sent, rows_across = _count_rows(problem, token_columns, head_columns)
    return BalancePlan(
        lengths=problem.lengths,
        text_lengths=problem.text_lengths,
        home=problem.home,
        num_devices=num_devices,
        num_heads=problem.num_heads,
        topology=problem.topology,
        cost=problem.cost,
        token_slices=token_slices,
        head_slices=head_slices,
        tokens=tokens,
        text_tokens=_sum_by(device, num_text, num_devices),
        attention_work=attention_work,
        load=problem.cost.linear(tokens) + attention_work,
        rows=rows,
        rows_sent=rows_sent,
        rows_across_machines=rows_across,
        load_lower_bound=lower_bounds[0],
        step_lower_bound=lower_bounds[1],
    )


def check_slices(
    caller: str, problem: BalanceProblem | BalancePlan, token_slices: NDArray, head_slices: NDArray
) -> None:
    """Refuse slices that are no tables, or name sequences or devices that are not there."""
    num_devices, num_sequences = problem.topology.num_devices, len(problem.lengths)
    for name, table, columns in (("token_slices", token_slices, 4), ("head_slices", head_slices, 6)):
        if table.dtype.kind not in "iu" or table.ndim != 2 or table.shape[1] != columns:
            raise ValueError(
                f"{caller}: {name} is a table of {columns} integers a row; got {table.dtype} of shape {table.shape}."
                f" Without any slice it has shape (0, {columns})."
            )
        for column, values, stop in (
            ("sequence", table[:, 0], num_sequences),
            ("device", table[:, -1], num_devices),
        ):
            bad = values[(values < 0) | (values >= stop)]
            if len(bad):
                raise ValueError(
                    f"{caller}: {name} {column} in [0, {stop}); got {bad[0]}. Both are counted from 0."
                )


def _attention_work(
    problem: BalanceProblem, head_columns: Int[np.ndarray, "6 head_slices"]
) -> Float[np.ndarray, " devices"]:
    """Seconds of attention per device: `4 d gamma / H` for every query-key pair of every head."""
    sequence, head_start, head_stop, query_start, query_stop, device = head_columns
    pairs = (head_stop - head_start) * (query_stop - query_start) * problem.lengths[sequence]
    pair_s = float(problem.cost.attention(1.0)) / problem.num_heads
    return np.bincount(device, weights=pairs, minlength=problem.topology.num_devices) * pair_s


def _count_rows(
    problem: BalanceProblem,
    token_columns: Int[np.ndarray, "4 token_slices"],
    head_columns: Int[np.ndarray, "6 head_slices"],
) -> Int[np.ndarray, "3 devices"]:
    """`rows`, `rows_sent` and `rows_across_machines` of every device.

    A token goes to each device once for every head of its sequence held there. With c(s, e) heads of sequence
    s on device e, a token of s on device d is sent sum over e of c(s, e), less c(s, d), times; the rows that
    leave the machine follow in the same way from the heads held on all its devices.
    """
    topology = problem.topology
    num_devices, num_sequences = topology.num_devices, len(problem.lengths)
    sequence, head_start, head_stop, _, _, device = head_columns
    heads = distinct_heads(sequence, head_start, head_stop, device)
    rows = _sum_by(device, heads * problem.lengths[sequence], num_devices)
    of_sequence = _sum_by(sequence, heads, num_sequences)

    token_sequence, start, stop, token_device = token_columns
    num_tokens = stop - start
    sent_to = of_sequence[token_sequence]
    here = _lookup(device * num_sequences + sequence, heads, token_device * num_sequences + token_sequence)
    rows_sent = _sum_by(token_device, num_tokens * (sent_to - here), num_devices)
    if topology.num_machines == 1:
        return np.stack([rows, rows_sent, np.zeros_like(rows)])
    machine, token_machine = topology.machine_of(device), topology.machine_of(token_device)
    in_machine = _sum_by(machine * num_sequences + sequence, heads, topology.num_machines * num_sequences)
    sent_in_machine = in_machine[token_machine * num_sequences + token_sequence]
    rows_across = _sum_by(token_device, num_tokens * (sent_to - sent_in_machine), num_devices)
    return np.stack([rows, rows_sent, rows_across])


def divides_items(head_slices: Int[np.ndarray, "n 6"], lengths: Int[np.ndarray, " sequences"]) -> bool:
    """Whether some head slice has a part of its sequence's queries."""
    sequence, _, _, start, stop, _ = head_slices.T
    return bool(np.any(stop - start != lengths[sequence]))


def distinct_heads(
    sequence: Int[np.ndarray, " head_slices"],
    head_start: Int[np.ndarray, " head_slices"],
    head_stop: Int[np.ndarray, " head_slices"],
    device: Int[np.ndarray, " head_slices"],
) -> Int[np.ndarray, " head_slices"]:
    """Heads each slice adds to those the slices before it have of the same sequence on the same device.

    Slices of one head with different query ranges share its keys, so a head counts once on a device.
    """
    same = (sequence[1:] == sequence[:-1]) & (device[1:] == device[:-1])
    if not same.any():
        return head_stop - head_start
    # A running maximum of head_stop within each (device, sequence): groups are kept apart by adding more than
    # any head_stop per group, and slices are sorted, so what the slices before cover ends at that maximum.
    base = np.concatenate([[0], np.cumsum(~same)]) * (int(head_stop.max()) + 1)
    covered = np.zeros_like(head_stop)
    covered[1:] = np.maximum(np.maximum.accumulate(base + head_stop)[:-1] - base[1:], 0)
    return np.maximum(head_stop - np.maximum(head_start, covered), 0)


def _lookup(
    keys: Int[np.ndarray, " m"], values: Int[np.ndarray, " m"], wanted: Int[np.ndarray, " n"]
) -> Int[np.ndarray, " n"]:
    """Sum of the values of each wanted key; 0 where there is none. Keys are sorted."""
    if len(keys) == len(wanted) and (keys == wanted).all() and (keys[1:] > keys[:-1]).all():
        return values  # bags: a device has heads of the sequences of which it has tokens
    upto = np.concatenate([[0], np.cumsum(values)])
    return upto[np.searchsorted(keys, wanted, side="right")] - upto[np.searchsorted(keys, wanted)]


def _columns(table: Int[np.ndarray, "rows columns"]) -> Int[np.ndarray, "columns rows"]:
    """Columns of a slice table as contiguous int64 arrays."""
    return np.ascontiguousarray(table.T, dtype=np.int64)


def _sum_by(
    group: Int[np.ndarray, " n"], values: Int[np.ndarray, " n"], num_groups: int
) -> Int[np.ndarray, " groups"]:
    """Sum of the values of each group; float64 inside, exact up to 2**53."""
    return np.bincount(group, weights=values, minlength=num_groups).astype(np.int64)
