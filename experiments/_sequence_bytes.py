"""Bytes that sequence-parallel attention sends, by the formulas of the docstrings in `parallel`.

Per device, mean over all, inside its machine and across machines. Only what moves rows counts: gathers of segment ids,
and sums and gathers for a text that is whole on every device, are apart. Ids that pass round a ring with keys count.
"""

from dataclasses import dataclass

from experiments.hlo import Traffic
from solver import SequenceMesh

_F32 = 4


@dataclass(frozen=True, slots=True)
class MovedRows:
    """What attention moves, as many heads of keys as of queries.

    Attributes:
        degrees: of Ulysses and the ring; of Torus attention Ulysses across machines is its pulls and pushes.
        tensor_bytes: of a device's q, or k, v or o, missing heads included.
        element_bytes: of an element of these.
        torus: whether it is Torus attention.
        gradient: whether the gradient is computed after the output.
        ids_bytes: of the segment ids of a device's rows, where keys pass round with them.
        one_program: whether the compiler sees both directions at once: the gradient then uses what a ring of two has
            sent for the output.
    """

    degrees: SequenceMesh
    tensor_bytes: float
    element_bytes: int
    torus: bool = False
    gradient: bool = False
    ids_bytes: float = 0.0
    one_program: bool = False

    @property
    def traffic(self) -> Traffic:
        """Bytes that a device sends; for the gradient those of the output, which are not sent again, and its own."""
        parts = [self._exchanges(), self._rings()]
        if self.torus:
            parts.append(self._pulls_and_pushes())
        return Traffic(sum(part.inside for part in parts), sum(part.across for part in parts))

    @property
    def _all_tensors(self) -> float:
        """q, k, v there and o back, and as much for the gradient."""
        return (2 if self.gradient else 1) * 4 * self.tensor_bytes

    def _exchanges(self) -> Traffic:
        """Ulysses, over the devices of a machine only if it is Torus."""
        near = self.degrees.ulysses_inside
        size = near if self.torus else self.degrees.ulysses_degree
        return Traffic(self._all_tensors * (near - 1) / size, self._all_tensors * (size - near) / size)

    def _pulls_and_pushes(self) -> Traffic:
        """Torus: all parts of q, k, v and o but the machine's own, and of their gradients."""
        machines = self.degrees.ulysses_across
        return Traffic(0.0, self._all_tensors * (machines - 1) / machines)

    def _rings(self) -> Traffic:
        """Keys and values of a device's heads, gathered by Ulysses, and for the gradient theirs too."""
        size, machines = self.degrees.ring_degree, self.degrees.ulysses_across if self.torus else 1
        keys = 2 * self.tensor_bytes / machines
        step = keys + self.ids_bytes * self.degrees.ulysses_degree / machines
        total = _ring_steps(size, machines) * step
        if self.gradient and size > 1:
            # Torus joins queries of three machines and more. Rings of the same keys send these for the first step once.
            turns = 2 * machines + 1 if machines > 2 else machines**2
            steps = size if size > 2 else 1 - self.one_program
            # Nothing is added to the gradients of a ring of two: the compiler sends them as the kernel gives them.
            gradient = _F32 / self.element_bytes if size > 2 else 1
            total += (turns * steps - (turns - machines)) * step + turns * (size - 1) * keys * gradient
        across = total / self.degrees.ring_inside if self.degrees.ring_across > 1 else 0.0
        return Traffic(total - across, across)


def _ring_steps(size: int, machines: int) -> int:
    """Of one ring, or of Torus' 2 N; of rings of two, which are no loops, those of the same keys send them once."""
    if machines == 1:
        return size - 1
    return machines if size == 2 else 2 * machines * (size - 1)
