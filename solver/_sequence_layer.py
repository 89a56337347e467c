"""One layer's time under a placement of Ulysses and ring degrees: linear layers, transfers, attention.

A layer is what a device of the fullest kind does: linear layers to q, k and v (a quarter of the layer's FLOP, 6 of 24
l d^2), attention, the other linear layers. Every algorithm is a list of events on the lanes of
`solver.TimelineEvent`; the layer's latency is their end.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from solver._sequence_hardware import Link, SequenceHardware
from solver._sequence_timeline import Lane, TimelineBuilder
from solver._topology import Topology

QKV_FLOPS, OTHER_FLOPS = 6, 18  # of l d^2


@dataclass(frozen=True, slots=True)
class SequenceMesh:
    """Degrees of sequence parallelism, each across machines or inside them.

    Attributes:
        ulysses_across, ulysses_inside: heads are dealt out over so many machines, and devices in each.
        ring_across, ring_inside: keys and values go round over so many machines, and devices in each.
    """

    ulysses_across: int
    ulysses_inside: int
    ring_across: int
    ring_inside: int

    @property
    def ulysses_degree(self) -> int:
        """Devices over which heads are dealt out."""
        return self.ulysses_across * self.ulysses_inside

    @property
    def ring_degree(self) -> int:
        """Devices of a ring."""
        return self.ring_across * self.ring_inside

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.ulysses_degree * self.ring_degree


@dataclass(frozen=True, slots=True)
class SequenceShape:
    """Sequences of a layer.

    Attributes:
        num_heads, head_dim: of attention; the width is their product.
        length: tokens of a sequence, text included.
        batch: sequences.
    """

    num_heads: int
    head_dim: int
    length: int
    batch: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a device's attention.

    Attributes:
        name: for the timeline.
        queries, keys: rows of each head and sequence.
        heads: of each sequence.
        merges: whether there is a partial output of these queries already.
    """

    name: str
    queries: int
    keys: int
    heads: int
    merges: bool = False


@dataclass(slots=True)
class Layer:
    """A layer while its timeline is made; sizes are of one device.

    Attributes:
        topology, shape, mesh, hardware: of the layer.
        one_sided: whether transfers are puts and gets.
        timeline: events so far.
    """

    topology: Topology
    shape: SequenceShape
    mesh: SequenceMesh
    hardware: SequenceHardware
    one_sided: bool
    timeline: TimelineBuilder

    @property
    def tokens(self) -> int:
        """Of each sequence on a device; the fullest has what does not divide."""
        return math.ceil(self.shape.length / self.mesh.num_devices)

    @property
    def heads(self) -> int:
        """Of each sequence on a device, during attention."""
        return math.ceil(self.shape.num_heads / self.mesh.ulysses_degree)

    @property
    def rows(self) -> int:
        """Tokens of each sequence on a device, during attention."""
        return self.tokens * self.mesh.ulysses_degree

    def bytes_of(self, rows: float, heads: float) -> float:
        """Bytes of a tensor of (token, head) rows, for each sequence of the batch."""
        return self.shape.batch * rows * heads * self.shape.head_dim * self.hardware.element_bytes

    def linear(self, name: str, flops: int, after: Iterable[int] = ()) -> int:
        """Linear layers of so many times l d^2 FLOP."""
        width = self.shape.num_heads * self.shape.head_dim
        flops_loc = float(flops) * self.shape.batch * self.tokens * width**2
        return self.timeline.add("compute", name, self.hardware.linear_seconds(flops_loc), after)

    def attend(self, piece: Piece, after: Iterable[int], beside: Iterable[int] = ()) -> int:
        """Attention of a piece, slower where transfers run beside it."""
        hardware, heads = self.hardware, self.shape.batch * piece.heads
        head_dim = self.shape.head_dim
        seconds = hardware.attention_seconds(piece.queries, piece.keys, heads, head_dim)
        if piece.merges:
            seconds += hardware.merge_seconds(piece.queries * heads * head_dim)
        return self.timeline.add("compute", piece.name, self.timeline.beside(seconds, beside), after)

    def transfer(
        self, lane: Lane, name: str, sent_bytes: float, peers: int, after: Iterable[int], senders: int = 0
    ) -> list[int]:
        """A transfer to so many peers; none where nothing is sent. `senders` of a machine's devices take part."""
        if not peers or not sent_bytes:
            return []
        link = self.hardware.inside if lane == "inside" else self.hardware.across
        sharing = min(link.shared_by, senders or self.topology.devices_per_machine)
        waiting = link.one_sided_s if self.one_sided else link.two_sided_s
        rate = link.bytes_per_s * self._share(link, peers)
        seconds = waiting + peers * link.message_s + sharing * sent_bytes / rate
        return [self.timeline.add(lane, name, seconds, after, sent_bytes)]

    def _share(self, link: Link, peers: int) -> float:
        if self.one_sided:
            return link.one_sided
        return link.one_peer if peers == 1 else link.all_to_all

    def barrier(self, name: str, after: Iterable[int]) -> list[int]:
        """All devices meet, which puts and gets need at both ends of a layer; two-sided calls meet by themselves."""
        if not self.one_sided or self.mesh.num_devices == 1:
            return []
        alone = self.topology.num_machines == 1
        lane: Lane = "inside" if alone else "across"
        link = self.hardware.inside if alone else self.hardware.across
        return [self.timeline.add(lane, f"barrier: {name}", link.one_sided_s, after)]

    def exchange(self, name: str, tensor_bytes: float, after: Iterable[int]) -> list[int]:
        """All-to-all over the whole Ulysses degree of so many bytes a device, its share to itself included."""
        mesh, after = self.mesh, tuple(after)
        inside = tensor_bytes * (mesh.ulysses_inside - 1) / mesh.ulysses_degree
        across = tensor_bytes * (mesh.ulysses_across - 1) / mesh.ulysses_across
        peers = (mesh.ulysses_across - 1) * mesh.ulysses_inside
        return [
            *self.transfer("across", name, across, peers, after),
            *self.transfer("inside", name, inside, mesh.ulysses_inside - 1, after),
        ]

    def scatter(self, name: str, tensor_bytes: float, after: Iterable[int]) -> list[int]:
        """All-to-all over the inner part of the Ulysses degree."""
        inside = self.mesh.ulysses_inside
        return self.transfer("inside", name, tensor_bytes * (inside - 1) / inside, inside - 1, after)

    def ring(self, piece: Piece, after: Iterable[int], beside: Iterable[int] = ()) -> int:
        """Attention of a piece's queries to the keys of the whole ring, each of whose members holds `piece.keys`.

        A step's transfer goes into the buffer that the step before last has read, and both sides start it together: it
        waits for that attention and for the transfer before.
        """
        degree, beside = self.mesh.ring_degree, tuple(beside)
        overlaps = self.hardware.ring_overlaps or self.one_sided
        held, last = list(after), -1
        for step in range(degree):
            passes = step < degree - 1
            waits = held if last < 0 else [*held, last]
            sent = self._pass_on(piece, waits) if passes and overlaps else []
            part = replace(piece, name=f"{piece.name}, step {step + 1}") if degree > 1 else piece
            last = self.attend(replace(part, merges=piece.merges or step > 0), held, (*beside, *sent[:1]))
            held = self._pass_on(piece, [last]) if passes and not overlaps else sent
        return last

    def _pass_on(self, piece: Piece, after: Iterable[int]) -> list[int]:
        """A ring step's transfer of keys and values."""
        mesh, after = self.mesh, tuple(after)
        sent_bytes = 2 * self.bytes_of(piece.keys, piece.heads)
        name = f"{piece.name}: keys and values go round"
        # A ring runs through a machine's devices before it goes on: those of one Ulysses group cross together.
        crossing = mesh.ulysses_inside
        across = self.transfer("across", name, sent_bytes, mesh.ring_across > 1, after, senders=crossing)
        return [*across, *self.transfer("inside", name, sent_bytes, mesh.ring_inside > 1, after)]
