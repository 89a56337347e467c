"""Which machines hold the sequences with much attention, and how much of it: settled before all else."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from solver._plan import BalanceProblem, total_of

# What a machine may be off, over the mean.
TOKENS_OFF = 0.001
TEXT_OFF = 0.008
ATTENTION_OFF = 0.003
_ATTENTION_SHARE = 0.1  # below it attention may be off in inverse proportion
# What a machine may have more of than its share of tokens before those of a sequence go where none of its attention
# is: of a sequence on several machines, and of any.
_CLEAR = 0.002
_GROSS = 0.02
_MAIN = 0.75  # a machine with so much of a sequence's attention holds all its tokens


@dataclass(frozen=True, slots=True, eq=False)
class Resources:
    """A step as integers.

    Attributes:
        problem: the step.
        values: (resources, n) text tokens if there are any, image tokens, query-key pairs over all heads.
        share: (resources,) of a device.
        off: (resources,) what a machine may be off, over its share.
        looser: how much more than usual attention may be off, being little of the step.
    """

    problem: BalanceProblem
    values: Int[np.ndarray, "resources n"]
    share: Float[np.ndarray, " resources"]
    off: Float[np.ndarray, " resources"]
    looser: float

    @classmethod
    def of(cls, problem: BalanceProblem) -> "Resources":
        """The resources of a step; attention counts the less the smaller its part of the step."""
        lengths, text = problem.lengths, problem.text_lengths
        kinds = [text, lengths - text] if text.any() else [lengths]
        pairs = lengths * lengths * problem.num_heads
        values = np.stack([*kinds, pairs])
        share = values.sum(1) / problem.topology.num_devices
        attention_s = float(problem.cost.attention(1.0)) / problem.num_heads * share[-1]
        total_s = float(problem.cost.linear(share[:-1].sum())) + attention_s
        looser = max(1.0, _ATTENTION_SHARE / max(attention_s / total_s, 1e-3)) if total_s else 1.0
        tokens_off = [TEXT_OFF, TOKENS_OFF] if len(kinds) == 2 else [TOKENS_OFF]
        off = np.array([*tokens_off, ATTENTION_OFF * looser])
        return cls(problem, values, np.maximum(share, 1e-9), off, looser)

    @property
    def tokens(self) -> Int[np.ndarray, " n"]:
        """Tokens of each sequence, of all kinds."""
        return self.values[:-1].sum(0)


@dataclass(frozen=True, slots=True, eq=False)
class FluidShares:
    """What each machine holds of the sequences that are cut.

    Attributes:
        sequences: by falling length.
        pairs, tokens: (k, machines) query-key pairs and tokens of each there; rows sum to all of a sequence.
    """

    sequences: Int[np.ndarray, " k"]
    pairs: Float[np.ndarray, "k machines"]
    tokens: Float[np.ndarray, "k machines"]


def place_fluid(resources: Resources, sequences: Int[np.ndarray, " k"], filled: float) -> FluidShares:
    """Machines of the sequences, longest first: one that can hold all of one, else as few as can be.

    Args:
        resources: the step.
        sequences: those to place.
        filled: part of a machine's attention that they may take.

    Returns:
        Their shares.
    """
    topology, lengths = resources.problem.topology, resources.problem.lengths
    num_machines = topology.num_machines
    sequences = sequences[np.argsort(-lengths[sequences], kind="stable")]
    need = resources.values[-1, sequences].astype(np.float64)
    of_machine = topology.devices_per_machine * resources.share[-1]
    filled = max(filled, min(1.0, need.sum() / (of_machine * num_machines) + 0.02))
    could_fit = need <= filled * of_machine
    # Evenly over machines if that keeps together what can be; else as tightly as possible.
    for tightly in (False, True):
        shares = _place(resources, sequences, filled * of_machine, tightly=tightly)
        if not ((shares.pairs > 0).sum(1) > 1)[could_fit].any():
            break
    return shares


def _place(
    resources: Resources, sequences: Int[np.ndarray, " k"], machine_room: float, *, tightly: bool
) -> FluidShares:
    topology = resources.problem.topology
    num_machines = topology.num_machines
    need = resources.values[-1, sequences].astype(np.float64)
    tokens = resources.tokens[sequences].astype(np.float64)
    room = np.full(num_machines, machine_room)
    token_room = np.full(num_machines, topology.devices_per_machine * resources.share[:-1].sum())
    shares = FluidShares(
        sequences, np.zeros((len(sequences), num_machines)), np.zeros((len(sequences), num_machines))
    )
    for k in range(len(sequences)):
        fits = (room >= need[k]) & (token_room >= tokens[k])
        if fits.any():
            taken, parts = [int(np.argmax(np.where(fits, -room if tightly else room, -np.inf)))], [need[k]]
        else:
            taken, parts = _fewest(room, need[k])
        shares.pairs[k, taken] = parts
        shares.tokens[k] = _with_attention(shares.pairs[k] / need[k], tokens[k], token_room)
        room[taken] -= parts
        token_room -= shares.tokens[k]
    return shares


def _with_attention(
    part: Float[np.ndarray, " machines"], tokens: float, room: Float[np.ndarray, " machines"]
) -> Float[np.ndarray, " machines"]:
    """Tokens of a sequence where its attention is, in as far as there is room; what is left where there is most."""
    main = part == part.max() if part.max() >= _MAIN else part
    held = np.minimum(tokens * main / total_of(main), np.maximum(room, 0.0))
    for machines in (part > 0, np.ones(len(part), bool)):
        free = np.where(machines, np.maximum(room - held, 0.0), 0.0)
        if free.any():
            held += free * min(1.0, (tokens - total_of(held)) / total_of(free))
    return held * (tokens / total_of(held)) if held.any() else tokens * part


def _fewest(room: Float[np.ndarray, " machines"], need: float) -> tuple[list[int], list[float]]:
    """Machines and parts of what needs several: those with the most room, filled one after another."""
    taken, parts, rest = [], [], need
    for machine in np.argsort(-room, kind="stable").tolist():
        part = min(rest, max(float(room[machine]), 0.0))
        if part > 0:
            taken.append(machine)
            parts.append(part)
            rest -= part
        if rest <= 0:
            break
    if rest > 0:  # no room anywhere: everybody takes some more
        taken = taken or [0]
        parts = parts or [0.0]
        parts = [part + rest / len(taken) for part in parts]
    return taken, parts


class Excess(NamedTuple):
    """What each machine holds beyond its share of all."""

    pairs: Float[np.ndarray, " machines"]
    tokens: Float[np.ndarray, " machines"]


def settle_shares(shares: FluidShares, excess: Excess, tokens_of_machine: float) -> Excess:
    """Shift shares of sequences between machines until these are off equally; in place.

    Attention of a sequence stays on the machines that hold it. So do tokens, but where a machine would be left with
    clearly more than its share: those of a sequence on several machines then go anywhere, and at last those of any.

    Args:
        shares: of the sequences.
        excess: of the machines.
        tokens_of_machine: on average.

    Returns:
        What the machines then hold beyond.
    """
    spans = (shares.pairs > 0).sum(1) > 1
    tokens = excess.tokens
    for most, rows, near in ((0.0, spans, True), (_CLEAR, spans, False), (_GROSS, spans | True, False)):
        for k in np.flatnonzero(rows):
            if tokens.max(initial=0.0) <= most * tokens_of_machine:
                break
            tokens = _level(shares.tokens[k], tokens, shares.pairs[k] > 0 if near else shares.pairs[k] >= 0)
    return Excess(_settle(shares.pairs, excess.pairs), tokens)


def _level(
    held: Float[np.ndarray, " machines"],
    excess: Float[np.ndarray, " machines"],
    may_take: Bool[np.ndarray, " machines"],
) -> Float[np.ndarray, " machines"]:
    """Move of what machines hold, in place, as much as some have too much of and others lack; what is then off."""
    given = np.minimum(np.maximum(excess, 0.0), held)
    taken = np.where(may_take, np.maximum(-excess, 0.0), 0.0)
    all_given, all_taken = total_of(given), total_of(taken)
    amount = min(all_given, all_taken)
    if amount <= 0:
        return excess
    change = taken * (amount / all_taken) - given * (amount / all_given)
    held += change
    return excess + change


def _settle(
    held: Float[np.ndarray, "k machines"], excess: Float[np.ndarray, " machines"]
) -> Float[np.ndarray, " machines"]:
    excess = excess.copy()
    for row in held:
        machines = np.flatnonzero(row > 0)
        if len(machines) > 1:
            mean = total_of(excess[machines]) / len(machines)
            change = np.maximum(mean - excess[machines], -0.5 * row[machines])
            change -= total_of(change) / len(machines)  # the sequence is as long as before
            if (change > -0.9 * row[machines]).all():
                row[machines] += change
                excess[machines] += change
    return excess
