"""Balance the sequences of a step over devices."""

from functools import partial

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from solver._bags import BagSpec, parse_bags
from solver._balance_assign import assign_to_bags
from solver._balance_bounds import FLOP_UNIT, lower_bounds, work_of
from solver._balance_slices import cut_heads, cut_tokens, make_parts
from solver._check import INT32_MAX, MOST_DEVICES, MOST_HEADS, instance, integer, integers, number
from solver._cost import CostModel
from solver._plan import BalancePlan, BalanceProblem
from solver._plan_measure import plan_from_slices
from solver._step_time import Links
from solver._topology import Topology

_FLUX_ON_H100 = CostModel(width=3072, gamma=0.4)
_H100_LINKS = Links()
_AS_IT_IS = "Give the number there is."


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

    Stateless, and the same bits on every host: sums are taken in a fixed order, ties go by index.

    Args:
        lengths: tokens of each sequence, text and image together; 0 is allowed, and no sequence at all.
        home: device of each sequence as the loader left it, from 0.
        num_devices: devices; a multiple of the bag spec's, each copy of which balances on its own.
        bags: a bag spec (`g4n8`: eight bags of four devices), "auto" to place sequences and heads freely, or None to
            leave every sequence whole at home.
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
        TypeError: bags, topology, cost or links of another type; num_devices or num_heads that is no integer;
            max_rows that is no number.
        ValueError: lengths, homes or text lengths that are not integers, of different shapes or out of range;
            num_devices or num_heads below 1, above 8,192 devices or 65,536 heads; a topology of another number of
            devices, or for bags="auto" with more than 1,024 in a machine; a bad bag spec;
            max_rows below 1 or that no plan keeps within, or given with bags.

    Example:
        A sequence of 6,000 tokens on the first of four devices, and three short ones; 8 heads of 4 devices each:

        >>> plan = balance([6000, 50, 60, 70], [0, 1, 2, 3], num_devices=4, bags="g4n1", num_heads=8)
        >>> plan.tokens.tolist()
        [1545, 1545, 1545, 1545]
        >>> round(plan.load_max_over_mean, 3)
        1.0

    Reference: KnapFormer, arXiv 2508.06001, sections 3.1-3.2. We also search beyond its greedy assignment,
    and deal heads that a bag's size does not divide.
    """
    num_devices = integer("balance", "num_devices", num_devices, most=MOST_DEVICES, advice=_AS_IT_IS)
    num_heads = integer("balance", "num_heads", num_heads, most=MOST_HEADS, advice=_AS_IT_IS)
    topology = _check_topology(num_devices, topology)
    instance("balance", "cost", cost, CostModel, advice="Write CostModel(width, gamma).")
    instance("balance", "links", links, Links, advice="Write Links(), or give its speeds.")
    max_rows = _check_max_rows(max_rows, bags)
    spec = None if bags is None or bags == "auto" else _check_bags(bags, num_devices)
    length, text, device = _check_sequences(lengths, text_lengths, home, topology)
    problem = BalanceProblem(length, text, device, num_heads, topology, cost)
    _check_work(problem)
    if bags != "auto":
        return _plan_with_bags(problem, spec)
    from solver._auto import auto_plan  # loads Numba where there is one, half a second

    return auto_plan(problem, links, max_rows, partial(_plan_with_bags, problem))


def _plan_with_bags(problem: BalanceProblem, bags: BagSpec | None) -> BalancePlan:
    num_devices = problem.topology.num_devices
    spec = BagSpec(((1, num_devices),)) if bags is None else bags
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


def _check_bags(bags: str | BagSpec, num_devices: int) -> BagSpec:
    if not isinstance(bags, (str, BagSpec)):
        raise TypeError(
            f"balance: bags is a string, a BagSpec or None; got {type(bags).__name__}. Write 'g8n4' or 'auto'."
        )
    spec = parse_bags(bags) if isinstance(bags, str) else bags
    spec.layout(num_devices)
    return spec


def _check_topology(num_devices: int, topology: Topology | None) -> Topology:
    if topology is None:
        return Topology(1, num_devices)
    instance("balance", "topology", topology, Topology, advice="Write Topology(machines, devices in each).")
    if topology.num_devices != num_devices:
        raise ValueError(
            f"balance: topology has num_devices devices; got {topology.num_machines} machines of "
            f"{topology.devices_per_machine} and num_devices={num_devices}. Make their product equal."
        )
    return topology


def _check_sequences(
    lengths: ArrayLike, text_lengths: ArrayLike | None, home: ArrayLike, topology: Topology
) -> Int[np.ndarray, "3 n"]:
    """Lengths, text lengths and homes."""
    tokens = "Lengths count tokens; 0 is allowed."
    num_devices = topology.num_devices
    length = integers("balance", "lengths", lengths, most=INT32_MAX, advice=tokens)
    places = f"Devices are numbered from 0; num_devices={num_devices}."
    device = integers("balance", "home", home, most=num_devices - 1, advice=places)
    text = np.zeros_like(length)
    if text_lengths is not None:
        text = integers("balance", "text_lengths", text_lengths, most=INT32_MAX, advice=tokens)
    if not len(length) == len(device) == len(text):
        raise ValueError(
            "balance: one home and one text length for every length; got shapes "
            f"lengths={length.shape}, home={device.shape}, text_lengths={text.shape}. "
            "Entry i of each belongs to sequence i."
        )
    above = np.flatnonzero(text > length)
    if len(above):
        raise ValueError(
            f"balance: text_lengths <= lengths; got text_lengths={text[above[0]]} of "
            f"lengths={length[above[0]]} at sequence {above[0]}. lengths counts text and image tokens."
        )
    return np.stack([length, text, device])


def _check_work(problem: BalanceProblem) -> None:
    pairs = problem.num_heads * float(np.sum(np.square(problem.lengths, dtype=np.float64)))
    if pairs >= 2.0**62:
        raise ValueError(
            f"balance: num_heads * sum of lengths^2 below 2^62, which int64 holds; got {pairs:.3g}, the longest of "
            f"{problem.lengths.max()} tokens at sequence {problem.lengths.argmax()}. "
            "Check the lengths: attention would never end."
        )


def _check_max_rows(max_rows: float | None, bags: str | BagSpec | None) -> float | None:
    if max_rows is None:
        return None
    if bags != "auto":
        raise ValueError(
            f"balance: max_rows goes with bags='auto'; got max_rows={max_rows} and bags={bags!r}. Bags hold about"
            " the mean on every device."
        )
    most = number("balance", "max_rows", max_rows, advice="1.5 suits most mixes; None sets no limit.")
    if not most >= 1:
        raise ValueError(f"balance: max_rows >= 1, the mean; got max_rows={max_rows}. 1.5 suits most mixes.")
    return most
