"""Which machines hold the sequences with much attention, and how much of it: settled before all else."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from solver._plan import BalanceProblem

# What a machine may be off, over the mean.
TOKENS_OFF = 0.001
TEXT_OFF = 0.008
ATTENTION_OFF = 0.003
_ATTENTION_SHARE = 0.1  # below it attention may be off in inverse proportion
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
        part = np.array(parts) / need[k]
        main = part.max() >= _MAIN
        token_part = (part == part.max()) / (part == part.max()).sum() if main else part
        shares.pairs[k, taken] = parts
        shares.tokens[k, taken] = tokens[k] * token_part
        room[taken] -= parts
        token_room[taken] -= tokens[k] * token_part
    return shares


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


def settle_shares(
    shares: FluidShares,
    excess_pairs: Float[np.ndarray, " machines"],
    excess_tokens: Float[np.ndarray, " machines"],
) -> Float[np.ndarray, " machines"]:
    """Shift shares of a sequence between the machines that hold it until these are off equally; in place.

    Args:
        shares: of the sequences.
        excess_pairs, excess_tokens: what each machine holds beyond its share of all.

    Returns:
        The pairs each machine then holds beyond.
    """
    _settle(shares.tokens, excess_tokens)
    return _settle(shares.pairs, excess_pairs)


def _settle(
    held: Float[np.ndarray, "k machines"], excess: Float[np.ndarray, " machines"]
) -> Float[np.ndarray, " machines"]:
    excess = excess.copy()
    for row in held:
        machines = np.flatnonzero(row > 0)
        if len(machines) > 1:
            change = np.maximum(excess[machines].mean() - excess[machines], -0.5 * row[machines])
            change -= change.mean()  # the sequence is as long as before
            if (change > -0.9 * row[machines]).all():
                row[machines] += change
                excess[machines] += change
    return excess
