"""Balance the sequences of a step over devices."""

from functools import partial

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from solver._bags import BagSpec, parse_bags
from solver._balance_assign import assign_to_bags
from solver._balance_bounds import FLOP_UNIT, lower_bounds, work_of
from solver._balance_slices import cut_heads, cut_tokens, make_parts
from solver._cost import CostModel
from solver._plan import BalancePlan, BalanceProblem
from solver._plan_measure import plan_from_slices
from solver._step_time import Links
from solver._topology import Topology

_FLUX_ON_H100 = CostModel(width=3072, gamma=0.4)
_H100_LINKS = Links()
_INT32_MAX = np.iinfo(np.int32).max


def balance(
    lengths: ArrayLike,
    home: ArrayLike,
    *,
    num_devices: int,
    bags: str | BagSpec | None,
    cost: CostModel = _FLUX_ON_H100,
    num_heads: int = 24,
    text_lengths: ArrayLike | None = None,
    topology: Topology | None = None,
    links: Links = _H100_LINKS,
    max_rows: float | None = None,
) -> BalancePlan:
    """Decide where every token and every (token, head) of a step goes; global, on the host.

    With bags, a sequence goes to one bag and is cut evenly over its devices: contiguous parts of its text and
    of its image tokens, and of its heads. Sequences are assigned to bags to minimise the cost of a
    static-shape step (most text tokens, most image tokens and most attention of any device), with no bag
    above the largest load of the published greedy.

    With `bags="auto"` nothing is prescribed: tokens (text and image apart, if there is text) and attention are each
    spread evenly over all devices, and (sequence, head) items are placed freely, so that as few rows as can be cross
    machines and devices. Where no balancing or equal bags would take less modelled time, the plan is theirs.

    Stateless, and the same bits on every host: sums are taken
    in a fixed order, ties go by index.

    Args:
        lengths: tokens of each sequence, text and image together; 0 is allowed.
        home: device of each sequence as the loader left it.
        num_devices: devices; a multiple of the bag spec's, each copy of which balances on its own.
        bags: a bag spec (`g4n8`: eight bags of four devices), or None to leave every sequence whole at home.
        cost: cost model of a transformer block.
        num_heads: attention heads.
        text_lengths: how many tokens of each sequence are text; none when not given.
        topology: machines of the devices; one machine when not given.
        links: speeds that "auto" compares plans by.
        max_rows: with "auto", most rows a device may hold in the attention layout, over the mean of the devices; any
            number when not given.

    Returns:
        Layouts as run-length slices, and what they cost each device.

    Raises:
        TypeError: bags of another type; num_devices or num_heads that is no integer.
        ValueError: lengths, homes or text lengths that are not integers, of different shapes or out of range;
            num_devices or num_heads below 1; a topology of another number of devices; a bad bag spec; max_rows that no
            plan keeps within, or given with bags.

    Reference: KnapFormer, arXiv 2508.06001, sections 3.1-3.2. We also search beyond its greedy assignment,
    and deal heads that a bag's size does not divide.
    """
    topology = _check_topology(num_devices, topology)
    length_array = _integers("lengths", lengths, _INT32_MAX)
    home_array = _integers("home", home, num_devices - 1)
    text_array = np.zeros_like(length_array)
    if text_lengths is not None:
        text_array = _integers("text_lengths", text_lengths, _INT32_MAX)
    _check_sequences(length_array, text_array, home_array)
    num_heads = _at_least_one("num_heads", num_heads)
    pairs = num_heads * float(np.sum(np.square(length_array, dtype=np.float64)))
    if pairs >= 2.0**62:
        raise ValueError(
            f"balance: num_heads * sum of lengths^2 below 2^62, which int64 holds; got {pairs:.3g}. "
            "Check the lengths: attention would never end."
        )
    problem = BalanceProblem(length_array, text_array, home_array, num_heads, topology, cost)
    if bags != "auto":
        if max_rows is not None:
            raise ValueError(
                f"balance: max_rows goes with bags='auto'; got max_rows={max_rows} and bags={bags!r}. Bags hold about"
                " the mean on every device."
            )
        return _plan_with_bags(problem, bags)
    if max_rows is not None and not max_rows >= 1:
        raise ValueError(f"balance: max_rows >= 1, the mean; got max_rows={max_rows}. 1.5 suits most mixes.")
    from solver._auto import auto_plan  # loads Numba where there is one, half a second

    return auto_plan(problem, links, max_rows, partial(_plan_with_bags, problem))


def _plan_with_bags(problem: BalanceProblem, bags: str | BagSpec | None) -> BalancePlan:
    num_devices = problem.topology.num_devices
    spec = BagSpec(((1, num_devices),)) if bags is None else _check_bags(bags)
    layout = spec.layout(num_devices)
    work = work_of(problem)
    bounds = lower_bounds(problem, layout, work)
    bag_of_sequence = problem.home
    if bags is not None:
        bag_of_sequence = assign_to_bags(problem, layout, work, targets=[bound.parts for bound in bounds])
    parts = make_parts(bag_of_sequence, layout)
    unit_s = FLOP_UNIT * problem.cost.seconds_per_flop
    return plan_from_slices(
        problem,
        cut_tokens(problem, bag_of_sequence, layout, parts),
        cut_heads(problem, parts),
        lower_bounds=(max(b.load for b in bounds) * unit_s, max(b.step for b in bounds) * unit_s),
    )


def _check_bags(bags: str | BagSpec) -> BagSpec:
    if isinstance(bags, BagSpec):
        return bags
    if not isinstance(bags, str):
        raise TypeError(
            f"balance: bags is a string, a BagSpec or None; got {type(bags).__name__}. Write 'g8n4'."
        )
    return parse_bags(bags)


def _check_topology(num_devices: int, topology: Topology | None) -> Topology:
    _at_least_one("num_devices", num_devices)
    if topology is None:
        return Topology(1, num_devices)
    if topology.num_devices != num_devices:
        raise ValueError(
            f"balance: topology has num_devices devices; got {topology.num_machines} machines of "
            f"{topology.devices_per_machine} and num_devices={num_devices}. Make their product equal."
        )
    return topology


def _at_least_one(name: str, value: int) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(
            f"balance: {name} is an integer; got {type(value).__name__}. Give the number there is."
        )
    if value < 1:
        raise ValueError(f"balance: {name} >= 1; got {name}={value}. Give the number there is.")
    return int(value)


def _check_sequences(
    lengths: Int[np.ndarray, " n"], text_lengths: Int[np.ndarray, " m"], home: Int[np.ndarray, " k"]
) -> None:
    if not len(lengths) == len(home) == len(text_lengths):
        raise ValueError(
            "balance: one home and one text length for every length; got shapes "
            f"lengths={lengths.shape}, home={home.shape}, text_lengths={text_lengths.shape}."
        )
    above = np.flatnonzero(text_lengths > lengths)
    if len(above):
        raise ValueError(
            f"balance: text_lengths <= lengths; got text_lengths={text_lengths[above[0]]} of "
            f"lengths={lengths[above[0]]} at sequence {above[0]}. lengths counts text and image tokens."
        )


def _integers(name: str, values: ArrayLike, most: int) -> Int[np.ndarray, " n"]:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(
            f"balance: {name} is one-dimensional; got shape {array.shape}. One entry per sequence."
        )
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(
            f"balance: {name} are integers; got dtype={array.dtype}. Convert them, rounding as you mean."
        )
    array = array.astype(np.int64)
    bad = np.flatnonzero((array < 0) | (array > most))
    if len(bad):
        raise ValueError(f"balance: {name} in 0..{most}; got {name}={array[bad[0]]} at sequence {bad[0]}.")
    return array
