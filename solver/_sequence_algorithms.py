"""Timelines of a layer: Ulysses and ring in one exchange, in groups of heads, and Torus attention."""

from solver._sequence_hardware import SequenceHardware
from solver._sequence_layer import OTHER_FLOPS, QKV_FLOPS, Layer, Piece, SequenceMesh, SequenceShape
from solver._sequence_timeline import TimelineBuilder, TimelineEvent
from solver._topology import Topology


def mesh_timeline(layer: Layer, head_groups: int = 1) -> tuple[TimelineEvent, ...]:
    """Ulysses over its whole degree, then the ring: USP and topology-aware placement alike.

    With several groups of heads, a group's exchange runs under the attention of the one before, and its outputs go back
    under that of the one after.
    """
    sizes = _group_sizes(layer.heads, head_groups)
    before = layer.linear("q, k, v", QKV_FLOPS)
    begun = [before, *layer.barrier("begin", [before])]
    there: list[list[int]] = []
    for index, heads in enumerate(sizes):
        tensors = 3 * _exchanged(layer, heads)
        there.append(layer.exchange(f"Ulysses: q, k, v{_of(index, sizes)}", tensors, begun))
    ended: list[int] = []
    back: list[list[int]] = []
    for index, heads in enumerate(sizes):
        piece = Piece(f"attention{_of(index, sizes)}", layer.rows, layer.rows, heads)
        beside = [*(there[index + 1] if index + 1 < len(sizes) else ()), *(back[-1] if back else ())]
        last = layer.ring(piece, [*begun, *there[index]], beside)
        back.append(layer.exchange(f"Ulysses: o{_of(index, sizes)}", _exchanged(layer, heads), [last]))
        ended += [last, *back[-1]]
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
    keys, to which all queries attend, and pushes outputs while it finishes its own. What is pulled first goes through
    the rest of the Ulysses degree, and keys go round the ring inside the machine at each attention.
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
        self.part_bytes = _exchanged(layer, layer.heads) / self.machines
        # Attention so far, ended last; puts and gets wait for all devices to have begun the layer.
        self.attended = before
        self.begun = [before, *layer.barrier("begin", [before])]
        self.here = [*self.begun, *layer.scatter("own q, k, v", 3 * self.part_bytes, self.begun)]

    def _pull(self, name: str, tensors: int, *, spare: bool) -> list[int]:
        """Two-sided pulls start with the attention they run under; a get only waits for a free buffer."""
        after = self.begun if self.layer.one_sided and not spare else [*self.begun, self.attended]
        return self.layer.transfer("across", name, tensors * self.part_bytes, 1, after)

    def _attend(self, name: str, parts: int, beside: list[int], *, merges: bool) -> None:
        piece = Piece(name, parts * self.part_rows, self.part_rows, self.layer.heads, merges)
        self.attended = self.layer.ring(piece, self.here, beside)

    def pull_queries(self) -> None:
        for k in range(self.machines):
            last = k == self.machines - 1
            name, tensors = ("k, v of machine +1", 2) if last else (f"q of machine +{k + 1}", 1)
            pulled = self._pull(f"pull {name}", tensors, spare=False)
            self._attend(f"attention: q +{k} to own k, v", 1, pulled, merges=False)
            self.here = [*pulled, *self.layer.scatter(f"scatter {name}", tensors * self.part_bytes, pulled)]

    def pull_keys(self) -> None:
        for k in range(1, self.machines):
            last = k == self.machines - 1
            name, pulled = f"k, v of machine +{k + 1}", []
            if not last:
                pulled = self._pull(f"pull {name}", 2, spare=True)
            parts = self.machines - 1 if last else self.machines
            self._attend(f"attention: all q to k, v +{k}", parts, pulled, merges=True)
            if not last:
                self.here = [*pulled, *self.layer.scatter(f"scatter {name}", 2 * self.part_bytes, pulled)]

    def push_outputs(self) -> list[int]:
        layer, others = self.layer, self.machines - 1
        final = [self.attended]
        gathered = layer.scatter("gather o", others * self.part_bytes, final)
        sent_bytes = others * self.part_bytes
        pushed = layer.transfer("across", "push o", sent_bytes, others, [*final, *gathered])
        self._attend("attention: own q to the last k, v", 1, pushed, merges=True)
        own = layer.scatter("gather own o", self.part_bytes, [self.attended])
        ended = [self.attended, *pushed, *own]
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
    """Events of a layer; `head_groups` None is Torus attention."""
    timeline = TimelineBuilder(taken=0.0 if one_sided else hardware.taken)
    layer = Layer(topology, shape, mesh, hardware, one_sided, timeline)
    return torus_timeline(layer) if head_groups is None else mesh_timeline(layer, head_groups)
