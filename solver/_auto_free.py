"""Free placement: a plan that balances tokens and attention separately.

1. Sequences with much attention are *fluid*: their heads, and queries of a head, are cut wherever a device has room
   left. All others stay *whole*: tokens and attention of one on one device, without traffic.
2. Fluid sequences get machines: one each where it can hold them, else the fewest. What they leave free of every
   machine's tokens and attention, whole sequences fill to the last per mille of each: what is off between machines
   could only be mended by traffic between them.
3. In a machine whole sequences are spread evenly, and the heads of fluid ones fill what they leave of every device's
   attention. So every device has its share of long sequences as far as that goes, and short ones cause no traffic.
   Exchanges of whole sequences and heads make whole heads fit; what is still off is mended by dividing heads.
4. Given the attention layout, the best token layout is a transportation problem, solved exactly for text and image.
"""

from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

from solver._auto_machine import Lines, MachineShare, plan_machine
from solver._auto_partition import partition
from solver._auto_place import Excess, FluidShares, Resources, place_fluid, settle_shares
from solver._auto_slices import head_slices_of, token_slices_of
from solver._plan import BalancePlan, BalanceProblem
from solver._plan_measure import plan_from_slices

# Attention of a sequence over a device's share from which on it is fluid.
_FLUID = 0.5
# Part of a machine's attention that fluid sequences may take before another machine is added; the first that lets whole
# sequences fill the rest.
_FILLED = (0.95, 0.88, 0.8, 0.7, 0.6)
_WELL_FILLED = 2.8  # how much more than it may a machine may be off before a fluid sequence is given another
_TOKENS_OFF = 0.003  # that, of tokens of a machine
_SPANNING = 3.0  # as bad as that: a sequence on several machines


def place_freely(problem: BalanceProblem, lower_bounds: tuple[float, float]) -> BalancePlan:
    """A plan of the problem; global, on the host.

    Args:
        problem: the step.
        lower_bounds: seconds, for the plan's certificate.
    """
    resources = Resources.of(problem)
    tokens = resources.tokens
    is_fluid = resources.values[-1] > _FLUID * resources.share[-1]
    is_fluid |= tokens > resources.share[:-1].sum()
    whole = np.flatnonzero(~is_fluid)
    fluid, machine_of = _choose_machines(resources, np.flatnonzero(is_fluid), whole)
    lines = _cut_lines(problem, fluid)
    fluid_tokens = _cut_tokens(problem, fluid)
    spans = ((fluid.pairs > 0) | (fluid.tokens > 0)).sum(1) > 1
    order = np.argsort(machine_of, kind="stable")
    ends = np.searchsorted(machine_of[order], np.arange(problem.topology.num_machines + 1))
    layouts = [
        plan_machine(
            resources,
            MachineShare(
                first_device=m * problem.topology.devices_per_machine,
                whole=whole[order[ends[m] : ends[m + 1]]],
                lines=lines[m],
                fluid=fluid.sequences,
                spans=spans,
                tokens=fluid_tokens[:, :, m],
            ),
        )
        for m in range(problem.topology.num_machines)
    ]
    return plan_from_slices(
        problem,
        token_slices_of([x.text for x in layouts], [x.image for x in layouts]),
        head_slices_of(problem, [x.heads for x in layouts]),
        lower_bounds=lower_bounds,
    )


def _choose_machines(
    resources: Resources,
    fluid: Int[np.ndarray, " k"],
    whole: Int[np.ndarray, " n"],
) -> tuple[FluidShares, Int[np.ndarray, " n"]]:
    """Machines of the fluid sequences and of the whole ones."""
    of_machine = resources.share * resources.problem.topology.devices_per_machine
    tokens_of_machine = float(of_machine[:-1].sum())
    best = np.inf
    tried: list[np.ndarray] = []
    for filled in _FILLED:
        shares = place_fluid(resources, fluid, filled)
        if any(np.array_equal(shares.pairs, other) for other in tried):
            continue
        tried.append(shares.pairs.copy())
        machine_of, excess = _fill_machines(resources, whole, shares)
        left = settle_shares(shares, Excess(excess[-1], excess[:-1].sum(0)), tokens_of_machine)
        off = float(np.abs(left.pairs).max() / (resources.off[-1] * of_machine[-1]))
        off = max(off, float(left.tokens.max()) / (_TOKENS_OFF * tokens_of_machine))
        cost = off + _SPANNING * int(((shares.pairs > 0).sum(1) > 1).sum())
        if cost < best - 1e-3:
            best, chosen, chosen_machines = cost, shares, machine_of
        if off <= _WELL_FILLED:
            break
    return chosen, chosen_machines


def _fill_machines(
    resources: Resources, whole: Int[np.ndarray, " n"], fluid: FluidShares
) -> tuple[Int[np.ndarray, " n"], Float[np.ndarray, "resources machines"]]:
    """The machine of each whole sequence, and what each machine holds beyond its share."""
    topology = resources.problem.topology
    held = np.zeros((len(resources.values), topology.num_machines))
    held[-1] = fluid.pairs.sum(0)
    kinds = resources.values[:-1, fluid.sequences] / np.maximum(resources.tokens[fluid.sequences], 1)
    for kind, part in zip(held[:-1], kinds, strict=True):
        kind[:] = (part[:, None] * fluid.tokens).sum(0)
    unit = resources.share * topology.devices_per_machine
    capacity = unit[:, None] - held
    home = resources.problem.home[whole] // topology.devices_per_machine
    values = resources.values[:, whole]
    where = partition(values, capacity, unit, resources.off, home, trades=True)
    filled = [np.bincount(where, weights=v, minlength=topology.num_machines) for v in values]
    return where, np.stack(filled) - capacity


def _cut_lines(problem: BalanceProblem, fluid: FluidShares) -> list[Lines]:
    """Each machine's stretches of the fluid sequences' lines: its whole heads, and a part of one before and after."""
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(problem.topology.num_machines)]
    for k, sequence in enumerate(fluid.sequences.tolist()):
        length = int(problem.lengths[sequence])
        end = length * problem.num_heads
        machines = np.flatnonzero(fluid.pairs[k] > 0)
        upto = np.rint(np.cumsum(fluid.pairs[k, machines]) / length).astype(np.int64)
        start = 0
        for m, stop in zip(machines.tolist(), [*upto[:-1].tolist(), end], strict=True):
            stop = min(max(stop, start), end)
            first_head = min(-(-start // length) * length, stop)
            last_head = max(stop // length * length, first_head)
            cuts = sorted({start, first_head, last_head, stop})
            found[m].extend((sequence, a, b) for a, b in pairwise(cuts))
            start = stop
    return [Lines(*np.array(x, np.int64).reshape(-1, 3).T) for x in found]


def _cut_tokens(problem: BalanceProblem, fluid: FluidShares) -> Int[np.ndarray, "2 k machines"]:
    """Text and image tokens of the fluid sequences on each machine."""
    counts = np.zeros((2, *fluid.tokens.shape), np.int64)
    text = problem.text_lengths[fluid.sequences]
    part = fluid.tokens / np.maximum(fluid.tokens.sum(1, keepdims=True), 1e-9)
    for kind, supply in enumerate((text, problem.lengths[fluid.sequences] - text)):
        upto = np.rint(np.cumsum(part, 1) * supply[:, None]).astype(np.int64)
        counts[kind] = np.diff(upto, axis=1, prepend=0)
    return counts
