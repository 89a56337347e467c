"""One machine of a plan: attention of its sequences over its devices, then their tokens."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from solver._auto_bins import Preferences, even_out, totals
from solver._auto_fill import deal_heads, spread, transfers
from solver._auto_partition import partition
from solver._auto_place import Resources
from solver._auto_slices import Pieces

# What devices may be off, over their share.
_ATTENTION_OFF = 0.0095
_LEAST_OFF = 0.15  # the least of that, where the whole machine is off
_WHOLE_TOKENS_OFF = 0.003  # in tokens of whole sequences: the token layout evens them out
_BESIDE_FLUID_OFF = 0.01  # in all, where fluid sequences even it out
_SPREAD_OFF = 0.0005  # in tokens, after that
_FIT_MOVES = 8  # exchanges per device


class Lines(NamedTuple):
    """Stretches of the (head, query) lines of sequences; arrays of shape (n,).

    A sequence's line is `head * length + query`, so it is num_heads * length long.
    """

    sequence: Int[np.ndarray, " n"]
    start: Int[np.ndarray, " n"]
    stop: Int[np.ndarray, " n"]


@dataclass(frozen=True, slots=True, eq=False)
class MachineShare:
    """What one machine holds of a step.

    Attributes:
        first_device: its first device.
        whole: whole sequences.
        lines: of the fluid sequences: all its whole heads of one in one stretch, and parts of heads.
        fluid: the fluid sequences of the step.
        spans: (fluid,) whether each is on several machines.
        tokens: (2, fluid) its text and image tokens of each.
    """

    first_device: int
    whole: Int[np.ndarray, " n"]
    lines: Lines
    fluid: Int[np.ndarray, " k"]
    spans: Bool[np.ndarray, " k"]
    tokens: Int[np.ndarray, "2 k"]


class MachineLayouts(NamedTuple):
    """Pieces of the attention layout, and of the token layout for text and for image tokens."""

    heads: Pieces
    text: Pieces
    image: Pieces


def plan_machine(resources: Resources, share: MachineShare) -> MachineLayouts:
    """Layouts of one machine's share over its devices."""
    problem = resources.problem
    n, whole = problem.topology.devices_per_machine, share.whole
    home = problem.home - share.first_device
    home = np.where((home >= 0) & (home < n), home, -1)
    where = _spread_whole(resources, whole, home, beside_fluid=len(share.lines.sequence) > 0)
    lines = Lines(
        np.concatenate([whole, share.lines.sequence]),
        np.concatenate([0 * whole, share.lines.start]),
        np.concatenate([problem.lengths[whole] * problem.num_heads, share.lines.stop]),
    )
    row, device, start, stop = _attention(resources, share, lines, where, home).T
    length = problem.lengths[lines.sequence][row]
    heads_here = -(-stop // length) - start // length

    sequences = np.concatenate([whole, share.fluid])
    place = np.full(len(problem.lengths), -1)
    place[sequences] = np.arange(len(sequences))
    # Rows that need not be sent, and home where that makes no difference.
    profit = np.zeros((len(sequences), n), np.int64)
    np.add.at(profit, (place[lines.sequence[row]], device), 2 * heads_here)
    at_home = np.flatnonzero(home[sequences] >= 0)
    profit[at_home, home[sequences[at_home]]] += 1
    spans = np.concatenate([np.zeros(len(whole), bool), share.spans])
    text = problem.text_lengths[whole]
    supplies = (
        np.concatenate([text, share.tokens[0]]),
        np.concatenate([problem.lengths[whole] - text, share.tokens[1]]),
    )
    kinds = []
    for supply in supplies:
        tokens = _spread_tokens(supply, profit, spans)
        k, q = np.nonzero(tokens)
        kinds.append(Pieces(sequences[k], q + share.first_device, 0 * k, tokens[k, q]))
    return MachineLayouts(Pieces(lines.sequence[row], device + share.first_device, start, stop), *kinds)


def _spread_whole(
    resources: Resources,
    whole: Int[np.ndarray, " n"],
    home: Int[np.ndarray, " sequences"],
    *,
    beside_fluid: bool,
) -> Int[np.ndarray, " n"]:
    """The device of each whole sequence: all resources evenly."""
    n = resources.problem.topology.devices_per_machine
    values = resources.values[:, whole]
    off = resources.off.copy()
    off[:-1] = np.maximum(off[:-1], _WHOLE_TOKENS_OFF)
    if beside_fluid:
        off = np.maximum(off, _BESIDE_FLUID_OFF)
    else:
        off[-1] = _ATTENTION_OFF * resources.looser * 0.9
    capacity = np.repeat(values.sum(1)[:, None] / n, n, 1)
    return partition(values, capacity, resources.share, off, home[whole], trades=not beside_fluid)


def _attention(
    resources: Resources,
    share: MachineShare,
    lines: Lines,
    where: Int[np.ndarray, " n"],
    home: Int[np.ndarray, " sequences"],
) -> Int[np.ndarray, "pieces 4"]:
    """Stretches (line, device, start, stop): whole sequences as they are, fluid ones dealt, and then evened out."""
    n, num_whole = resources.problem.topology.devices_per_machine, len(share.whole)
    lengths = resources.problem.lengths[lines.sequence]
    queries = lines.stop - lines.start
    pairs = queries * lengths
    mean = int(pairs.sum()) // n
    # Off the share of all devices, of which the machine's own mean may be off.
    most = _ATTENTION_OFF * resources.looser * resources.share[-1]
    machine_off = mean - resources.share[-1]
    over, under = (int(max(most - x, _LEAST_OFF * most)) for x in (machine_off, -machine_off))
    held = np.zeros((len(queries), n), np.int64)
    if len(queries) > num_whole:
        where, held[num_whole:] = _deal_fluid(resources, share, where, home, mean, min(over, under))
    held[np.arange(num_whole), where] = queries[:num_whole]
    if resources.looser > 1:  # little of the step: what a device lacks costs less than rows
        under = int(pairs.sum())
    moves = transfers(lengths, held, (held * lengths[:, None]).sum(0) - mean, over, under)
    return _stretches(held, lines.start, moves)


def _deal_fluid(
    resources: Resources,
    share: MachineShare,
    where: Int[np.ndarray, " n"],
    home: Int[np.ndarray, " sequences"],
    mean: int,
    slack: int,
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, "lines devices"]]:
    """Deal fluid lines to devices, then exchange whole sequences and heads between devices for a better fit.

    Args:
        resources, share: the step, and what of it is this machine's.
        where: device of each whole sequence.
        home: device of each sequence of the step in its home layout; -1 elsewhere.
        mean: query-key pairs of a device.
        slack: pairs by which a device may be off.

    Returns:
        The devices of the whole sequences, and the queries of each fluid line on each device.
    """
    n, num_whole = resources.problem.topology.devices_per_machine, len(share.whole)
    whole_pairs, whole_tokens = resources.values[-1, share.whole], resources.tokens[share.whole]
    lengths = resources.problem.lengths[share.lines.sequence]
    queries = share.lines.stop - share.lines.start
    unit = np.minimum(queries, lengths)  # what is dealt: a head, or the part of one
    number, unit_pairs = queries // unit, unit * lengths
    room = mean - np.bincount(where, weights=whole_pairs, minlength=n).astype(np.int64)
    order = np.argsort(-unit_pairs * number, kind="stable")
    dealt = np.zeros((len(number), n), np.int64)
    dealt[order] = deal_heads(unit_pairs[order], number[order], room)
    k, device = np.nonzero(dealt)
    count = dealt[k, device]
    k, device = np.repeat(k, count), np.repeat(device, count)
    pairs = np.concatenate([whole_pairs, unit_pairs[k]])
    tokens = np.concatenate([whole_tokens, 0 * k])
    values = np.stack([tokens / (_BESIDE_FLUID_OFF * resources.share[:-1].sum()), pairs / max(slack, 1)])
    both = np.concatenate([where, device])
    preferences = Preferences(
        home=np.concatenate([home[share.whole], np.full(len(k), -1)]),
        kind=np.concatenate([0 * where, 1 + k]),
        # A head goes where others of its sequence are.
        allowed=np.concatenate([np.ones((1, n), bool), (dealt > 0) | (number == 1)[:, None]]),
    )
    capacity = np.repeat(totals(values)[:, None] / n, n, 1)
    even_out(values, capacity, both, preferences, _FIT_MOVES * n, False)
    held = np.zeros_like(dealt)
    np.add.at(held, (k, both[num_whole:]), unit[k])
    return both[:num_whole], held


def _stretches(
    held: Int[np.ndarray, "lines devices"], base: Int[np.ndarray, " lines"], moves: Int[np.ndarray, "moves 4"]
) -> Int[np.ndarray, "pieces 4"]:
    """Stretches (line, device, start, stop), by device in each line; moves take from the end of a source."""
    row, device = np.nonzero(held)
    queries = held[row, device]
    end = np.cumsum(queries)
    shift = (end - queries)[np.searchsorted(row, row)] - base[row]
    table = np.stack([row, device, end - queries - shift, end - shift], 1)
    if not len(moves):
        return table
    at = {pair: i for i, pair in enumerate(zip(row.tolist(), device.tolist(), strict=True))}
    moved = []
    for line, source, target, count in moves.tolist():
        i = at[line, source]
        stop = int(table[i, 3])
        moved.append((line, target, stop - count, stop))
        table[i, 3] = stop - count
    return np.concatenate([table, np.array(moved, np.int64)])


def _spread_tokens(
    supply: Int[np.ndarray, " k"], profit: Int[np.ndarray, "k devices"], spans: Bool[np.ndarray, " k"]
) -> Int[np.ndarray, "k devices"]:
    """Tokens of one kind over devices, evenly: those whose rows leave the machine from all devices alike.

    The slow links are between machines, and wait for the device that sends most.
    """
    n, total = profit.shape[1], int(supply.sum())
    capacity = np.full(n, max(int(total / n * (1 + _SPREAD_OFF)), -(-total // n)))
    far = np.where(spans, supply, 0)
    even = far[:, None] // n + (np.arange(n) < far[:, None] % n)
    return even + spread(supply - far, profit, np.maximum(capacity - even.sum(0), 0))
