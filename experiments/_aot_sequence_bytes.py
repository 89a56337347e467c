"""Bytes that sequence-parallel attention sends, by the formulas of the docstrings in `parallel`.

Per device, mean over all, inside its machine and across machines. Only what moves rows counts: gathers of segment ids,
and sums and gathers for a text that is whole on every device, are apart. Ids that pass round a ring with keys count.
"""

import math

from experiments._aot_sequence import TORUS, Case
from experiments.hlo import Traffic
from solver import SequenceMesh

_BF16, _F32, _INT32 = 2, 4, 4


def wanted_traffic(case: Case, degrees: SequenceMesh) -> Traffic:
    """Bytes of a case; the gradient's come to those of the output, which are not sent again."""
    parts = [_exchanges(case, degrees), _rings(case, degrees)]
    if case.algorithm == TORUS:
        parts.append(_pulls_and_pushes(case, degrees))
    return Traffic(sum(part.inside for part in parts), sum(part.across for part in parts))


def _heads(case: Case, degrees: SequenceMesh) -> int:
    """Of a device, while it attends."""
    return math.ceil(case.workload.num_heads / degrees.ulysses_degree)


def tensor_bytes(case: Case, degrees: SequenceMesh) -> float:
    """Bytes of a device's q, or k, v or o, missing heads included."""
    heads = _heads(case, degrees) * degrees.ulysses_degree
    return case.padded_length / degrees.num_devices * heads * case.workload.head_dim * _BF16


def _directions(case: Case) -> int:
    return 2 if case.gradient else 1


def _exchanges(case: Case, degrees: SequenceMesh) -> Traffic:
    """Ulysses: q, k, v there and o back, over the devices of a machine only if it is Torus."""
    size, near = degrees.ulysses_degree, degrees.ulysses_inside
    if case.algorithm == TORUS:
        size = near
    total = _directions(case) * 4 * tensor_bytes(case, degrees)
    return Traffic(total * (near - 1) / size, total * (size - near) / size)


def _rings(case: Case, degrees: SequenceMesh) -> Traffic:
    """Keys and values of a device's heads, gathered by Ulysses, and for the gradient theirs too."""
    size = degrees.ring_degree
    gathered = degrees.ulysses_inside if case.algorithm == TORUS else degrees.ulysses_degree
    rows = case.padded_length / degrees.num_devices * gathered
    elements = 2 * rows * _heads(case, degrees) * case.workload.head_dim
    step = elements * _BF16 + (rows * _INT32 if case.has_ids else 0)
    machines = degrees.ulysses_across if case.algorithm == TORUS else 1
    total = _ring_steps(size, machines) * step
    if case.gradient and size > 1:
        # Torus joins queries of three machines and more. Rings of the same keys send these for the first step once.
        turns = 2 * machines + 1 if machines > 2 else machines**2
        keys_move = turns * (size if size > 2 else 1) - (turns - machines)
        # Nothing is added to the gradients of a ring of two: the compiler sends them as the kernel gives them.
        gradient = _F32 if size > 2 else _BF16
        total += keys_move * step + turns * (size - 1) * elements * gradient
    across = total / degrees.ring_inside if degrees.ring_across > 1 else 0.0
    return Traffic(total - across, across)


def _ring_steps(size: int, machines: int) -> int:
    """Of one ring, or of Torus' 2 N; of rings of two, which are no loops, those of the same keys send them once."""
    if machines == 1:
        return size - 1
    return machines if size == 2 else 2 * machines * (size - 1)


def _pulls_and_pushes(case: Case, degrees: SequenceMesh) -> Traffic:
    """Torus: all parts of q, k, v and o but the machine's own, and of their gradients."""
    machines = degrees.ulysses_across
    return Traffic(0.0, _directions(case) * 4 * tensor_bytes(case, degrees) * (machines - 1) / machines)
