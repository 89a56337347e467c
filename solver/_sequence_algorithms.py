"""Timelines of a layer: Ulysses and ring in one exchange, in groups of heads, and Torus attention."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from solver._check import flag, instance, integer
from solver._sequence_hardware import SequenceHardware
from solver._sequence_layer import OTHER_FLOPS, QKV_FLOPS, Layer, Piece, SequenceMesh, SequenceShape
from solver._sequence_timeline import TimelineBuilder, TimelineEvent, Transfer
from solver._topology import Topology

_CALLER = "layer_timeline"


def mesh_timeline(layer: Layer, head_groups: int = 1) -> tuple[TimelineEvent, ...]:
    """Ulysses over its whole degree, then the ring: USP and topology-aware placement alike.

    With several groups of heads, a group's exchange runs under the attention of the one before, and its outputs go back
    under that of the one after.
    """
    sizes = _group_sizes(layer.heads, head_groups)
    before = layer.linear("q, k, v", QKV_FLOPS)
    begun = [before, *layer.barrier("begin", [before])]

    def there(index: int) -> Transfer:
        name = f"Ulysses: q, k, v{_of(index, sizes)}"
        return layer.exchange(name, 3 * _exchanged(layer, sizes[index]), begun)

    def back(index: int, last: int) -> Transfer:
        return layer.exchange(f"Ulysses: o{_of(index, sizes)}", _exchanged(layer, sizes[index]), [last])

    arrived, last, ended = there(0), before, []
    for index, heads in enumerate(sizes):
        piece = Piece(f"attention{_of(index, sizes)}", layer.rows, layer.rows, heads)
        ahead = [partial(there, index + 1)] if index + 1 < len(sizes) else []
        behind = [partial(back, index - 1, last)] if index else []
        last, moved = layer.ring(piece, [*begun, *arrived], ahead + behind)
        arrived = moved[0] if ahead else ()
        ended += [last, *(moved[-1] if behind else ())]
    ended += back(len(sizes) - 1, last)
    layer.linear("other linear layers", OTHER_FLOPS, [*ended, *layer.barrier("end", ended)])
    return tuple(layer.timeline.events)


def _group_sizes(heads: int, groups: int) -> list[int]:
    return [heads // groups + (index < heads % groups) for index in range(groups)]


def _of(index: int, sizes: list[int]) -> str:
    return f", heads {index + 1}/{len(sizes)}" if len(sizes) > 1 else ""


def _exchanged(layer: Layer, heads: int) -> float:
    """Bytes of a tensor on a device before the exchange, for `heads` of the heads that it has afterwards."""
    return layer.bytes_of(layer.tokens, heads * layer.mesh.ulysses_degree)


def torus_timeline(layer: Layer) -> tuple[TimelineEvent, ...]:
    """Torus attention over all machines of the mesh, whose rings lie inside them.

    Machine t's own parts never move. It pulls the queries of the others, attending each to its own keys, then their
    keys, to which all queries attend, and pushes outputs while it finishes its own. Keys go round the ring inside the
    machine at each attention. The rest of the Ulysses degree exchanges before the first pull and after the last push.
    """
    before = layer.linear("q, k, v", QKV_FLOPS)
    torus = _Torus(layer, before)
    torus.pull_queries()
    torus.pull_keys()
    layer.linear("other linear layers", OTHER_FLOPS, torus.push_outputs())
    return tuple(layer.timeline.events)


class _Torus:
    """The three phases; `part` is what one machine's tokens amount to in the heads of another."""

    def __init__(self, layer: Layer, before: int) -> None:
        self.layer = layer
        self.machines = layer.mesh.ulysses_across
        self.part_rows = layer.tokens * layer.mesh.ulysses_inside
        self.all_bytes = _exchanged(layer, layer.heads)
        begun = [before, *layer.barrier("begin", [before])]
        self.begun = [*begun, *layer.scatter("Ulysses inside: q, k, v", 3 * self.all_bytes, begun)]
        # What the next attention waits for; attention so far, ended last.
        self.here, self.attended = self.begun, before

    def _move(self, name: str, parts: int, peers: int, after: list[int]) -> Transfer:
        return self.layer.transfer("across", name, parts * self.all_bytes / self.machines, peers, after)

    def _pull(self, name: str, tensors: int, *, spare: bool) -> Callable[[], Transfer]:
        """Two-sided pulls start with the attention they run under; a get only waits for a free buffer."""
        after = self.begun if self.layer.one_sided and not spare else [*self.begun, self.attended]
        return partial(self._move, f"pull {name}", tensors, 1, after)

    def _attend(
        self,
        name: str,
        parts: int,
        beside: Sequence[Callable[[], Transfer]],
        *,
        merges: bool,
        same_keys: bool = False,
    ) -> list[int]:
        """Returns what is moved beside it."""
        rows, heads = self.part_rows, self.layer.heads
        piece = Piece(f"attention: {name}", parts * rows, rows, heads, merges, same_keys)
        self.attended, moved = self.layer.ring(piece, self.here, beside)
        return [number for transfer in moved for number in transfer]

    def pull_queries(self) -> None:
        for k in range(self.machines):
            last = k == self.machines - 1
            name, tensors = ("k, v of machine +1", 2) if last else (f"q of machine +{k + 1}", 1)
            pull = self._pull(name, tensors, spare=False)
            self.here = self._attend(f"q +{k} to own k, v", 1, [pull], merges=False, same_keys=k > 0)

    def pull_keys(self) -> None:
        for k in range(1, self.machines - 1):
            pull = self._pull(f"k, v of machine +{k + 1}", 2, spare=True)
            self.here = self._attend(f"all q to k, v +{k}", self.machines, [pull], merges=True)
        self._attend(f"all q but own to k, v +{self.machines - 1}", self.machines - 1, [], merges=True)

    def push_outputs(self) -> list[int]:
        layer, others = self.layer, self.machines - 1
        push = partial(self._move, "push o", others, others, [self.attended])
        pushed = self._attend("own q to the last k, v", 1, [push], merges=True, same_keys=True)
        ended = [self.attended, *pushed]
        ended += layer.scatter("Ulysses inside: o", self.all_bytes, ended)
        return [*ended, *layer.barrier("end", ended)]


def layer_timeline(
    topology: Topology,
    shape: SequenceShape,
    mesh: SequenceMesh,
    hardware: SequenceHardware,
    *,
    head_groups: int | None = 1,
    one_sided: bool = False,
) -> tuple[TimelineEvent, ...]:
    """Events of a layer of any mesh, whether the planner would take it or not.

    As many two-sided transfers are under way at a time as the hardware has `transfers_under_way`, of puts and gets any
    number.

    Args:
        topology: machines and devices in each.
        shape: of the sequences.
        mesh: degrees over all devices of the topology.
        hardware: of a device and its links.
        head_groups: exchanges that Ulysses is cut into; None is Torus attention, for which Ulysses spans all machines
            of several, and the ring lies inside them.
        one_sided: whether transfers are puts and gets.

    Returns:
        What a device and its links do, in the order of the program on each lane.

    Raises:
        TypeError: for an argument of another kind.
        ValueError: for a mesh of other machines or devices than the topology's, more groups than a device has heads, or
            Torus attention on a mesh that is not for it.

    Example:
        >>> from solver._sequence_hardware import A100_MACHINE
        >>> shape, mesh = SequenceShape(24, 128, 66_048, 1), SequenceMesh(4, 1, 1, 8)
        >>> events = layer_timeline(Topology(4, 8), shape, mesh, A100_MACHINE, head_groups=None)
        >>> {event.lane for event in events} == {"compute", "inside", "across"}
        True
        >>> f"{max(event.stop_s for event in events) * 1e3:.1f} ms"
        '21.6 ms'
    """
    one_sided = _checked_kinds(topology, shape, mesh, hardware, one_sided)
    _check_mesh(topology, mesh, is_torus=head_groups is None)
    timeline = TimelineBuilder(None if one_sided else hardware.transfers_under_way)
    layer = Layer(topology, shape, mesh, hardware, one_sided, timeline)
    if head_groups is None:
        return torus_timeline(layer)
    advice = f"A device has {layer.heads} of {shape.num_heads} heads; 1 exchanges all at once, None is Torus."
    head_groups = integer(_CALLER, "head_groups", head_groups, most=layer.heads, advice=advice)
    return mesh_timeline(layer, head_groups)


def _checked_kinds(topology: Any, shape: Any, mesh: Any, hardware: Any, one_sided: Any) -> bool:
    """`one_sided` as a bool."""
    for name, value, kind, advice in (
        ("topology", topology, Topology, "Give Topology(machines, devices in each)."),
        ("shape", shape, SequenceShape, "Give SequenceShape(num_heads, head_dim, length, batch)."),
        (
            "mesh",
            mesh,
            SequenceMesh,
            "Give SequenceMesh(ulysses_across, ulysses_inside, ring_across, ring_inside).",
        ),
        ("hardware", hardware, SequenceHardware, "A100_MACHINE is one."),
    ):
        instance(_CALLER, name, value, kind, advice=advice)
    return flag(_CALLER, "one_sided", one_sided, advice="True is puts and gets.")


def _check_mesh(topology: Topology, mesh: SequenceMesh, *, is_torus: bool) -> None:
    across, inside = mesh.ulysses_across * mesh.ring_across, mesh.ulysses_inside * mesh.ring_inside
    if (across, inside) != (topology.num_machines, topology.devices_per_machine):
        raise ValueError(
            f"{_CALLER}: the mesh has the topology's machines and devices; got {mesh}, {across} x {inside}, on"
            f" {topology}. Degrees across multiply to num_machines, those inside to devices_per_machine."
        )
    if is_torus and (mesh.ulysses_across == 1 or mesh.ring_across > 1):
        raise ValueError(
            f"{_CALLER}: for Torus attention (head_groups=None) Ulysses spans all of several machines; got {mesh} on"
            f" {topology}. Make ulysses_across the machines and ring_across 1, or give head_groups."
        )
