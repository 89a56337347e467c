"""What each device computes and receives, and when, read from the traced program of a sequence-parallel attention.

The program is interpreted with owners in the place of numbers: an array is the set of devices whose rows it is made
of, and the time at which it is there. Attention and collectives take time in proportion to their work and bytes; they
begin when their inputs are there and what comes before them on the same unit is done. Everything else takes none. A
pass through a loop begins when the pass before it is over. A transfer is of queries if it reaches the queries of an
attention, of keys and values if it reaches those, and of outputs if it comes from one.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from parallel import DifferentiableAttention

Unit = Literal["attention", "inside", "across"]
_ATTENTION = "figure_attention"  # the name by which the trace shows it


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of a device, in units of the whole attention's time and of one tensor's share (q, of its rows) sent.

    Attributes:
        inside, across: time to send one tensor's share, inside a machine and across machines.
    """

    inside: float = 0.05
    across: float = 0.08


@dataclass(frozen=True, slots=True)
class Event:
    """Something a device does.

    Attributes:
        device: who.
        unit: which of its units.
        start, stop: times.
        owners: devices whose rows take part: of "q" and "kv" for attention; of what arrives for a transfer, by what it
            is: "q", "kv", "o".
        sources: devices it receives from.
        share: for a transfer, how many times its share of one tensor the device receives from other machines.
    """

    device: int
    unit: Unit
    start: float
    stop: float
    owners: dict[str, frozenset[int]]
    sources: tuple[int, ...] = ()
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class _Value:
    """An array on one device.

    Attributes:
        ready: when it is there.
        owners: devices whose rows it is made of.
        attended: whether it is an output of attention.
        via: numbers of the transfers that it came by.
    """

    ready: float = 0.0
    owners: frozenset[int] = frozenset()
    attended: bool = False
    via: frozenset[int] = frozenset()


_Row = tuple[_Value, ...]  # of all devices


def trace(
    attention: Callable[..., Any],
    axes: dict[str, int],
    *,
    sharded: Sequence[str],
    devices_per_machine: int,
    num_heads: int,
    speeds: Speeds = Speeds(),
) -> list[Event]:
    """Events of one forward call.

    Args:
        attention: of (q, k, v, block_attention=...), as inside `shard_map`.
        axes: the mesh: sizes by name, devices in row-major order.
        sharded: the axes over which the sequence is divided, in order.
        devices_per_machine: consecutive devices of a machine.
        num_heads: of q, k and v.
        speeds: of transfers.

    Raises:
        NotImplementedError: for a program with control flow or collectives that are not read here.
    """
    mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
    rows = jax.P(None, tuple(sharded))
    block = DifferentiableAttention(_block)
    call = jax.shard_map(
        partial(attention, block_attention=block), mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False
    )
    length = math.prod(axes.values())
    qkv = [jax.ShapeDtypeStruct((1, length, num_heads, 1), jnp.float32)] * 3
    program = jax.make_jaxpr(call)(*qkv).jaxpr
    (mapped,) = program.eqns
    inputs = [tuple(_Value(0.0, frozenset({device})) for device in range(length))] * 3
    reader = _Reader(axes, devices_per_machine, speeds, num_heads)
    reader.run(mapped.params["jaxpr"], (), inputs)
    return [reader.named(number) for number in range(len(reader.events))]


def _block(q: Any, k: Any, v: Any, mask: Any, scale: float) -> tuple[Any, Any]:
    """In the place of attention: of the right shapes, under a name that the trace shows."""

    def figure_attention(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        return q + k.sum() + v.sum(), q[..., 0]

    return jax.jit(figure_attention)(q, k, v)


@dataclass(slots=True)
class _Reader:
    """The interpreter.

    Attributes:
        events: so far; of a transfer the owners are not yet by what it carries.
        free: when each unit of each device is.
        carried: what a transfer turned out to be of, by its number among the events.
    """

    axes: dict[str, int]
    devices_per_machine: int
    speeds: Speeds
    num_heads: int
    events: list[Event] = field(default_factory=list)
    free: dict[tuple[int, Unit], float] = field(default_factory=dict)
    carried: dict[int, set[str]] = field(default_factory=dict)

    @property
    def devices(self) -> range:
        """All of them."""
        return range(math.prod(self.axes.values()))

    def named(self, number: int) -> Event:
        """An event of the finished program."""
        event = self.events[number]
        if event.unit == "attention":
            return event
        (owners,) = event.owners.values()
        return replace(
            event, owners={name: owners for name in ("q", "kv", "o") if name in self.carried[number]}
        )

    def run(self, program: Any, constants: Sequence[_Row], inputs: Sequence[_Row]) -> list[_Row]:
        """A program's outputs."""
        known: dict[Any, _Row] = dict(zip(program.constvars, constants, strict=True))
        known.update(zip(program.invars, inputs, strict=True))

        def value(var: Any) -> _Row:
            return self._nothing if isinstance(var, core.Literal) else known[var]

        for eqn in program.eqns:
            known.update(zip(eqn.outvars, self._apply(eqn, [value(x) for x in eqn.invars]), strict=True))
        return [value(x) for x in program.outvars]

    def _apply(self, eqn: Any, inputs: list[_Row]) -> Iterable[_Row]:
        name, inner = eqn.primitive.name, eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.params.get("name") == _ATTENTION:
            return self._attend(eqn, inputs)
        if name == "scan":
            return self._scan(eqn, inputs)
        if name in ("ppermute", "all_to_all"):
            return [self._collective(eqn, inputs[0])]
        if name == "optimization_barrier":
            ready = [max(x[device].ready for x in inputs) for device in self.devices]
            return [_at(ready, row) for row in inputs]
        if inner is not None:
            closed = isinstance(inner, core.ClosedJaxpr)
            program, constants = (inner.jaxpr, inner.consts) if closed else (inner, ())
            return self.run(program, [self._nothing] * len(constants), inputs)
        if (
            any("jaxpr" in key or key == "branches" for key in eqn.params)
            or "axis_index_groups" in eqn.params
        ):
            raise NotImplementedError(f"trace: a forward pass without masks or text; got {name}.")
        return [self._joined(inputs)] * len(eqn.outvars)

    @property
    def _nothing(self) -> _Row:
        return (_Value(),) * len(self.devices)

    def _joined(self, inputs: Sequence[_Row]) -> _Row:
        """Made of all inputs, and there when they are."""
        values = []
        for device in self.devices:
            here = [x[device] for x in inputs]
            owners, via = (_union(getattr(x, name) for x in here) for name in ("owners", "via"))
            ready = max((x.ready for x in here), default=0.0)
            values.append(_Value(ready, owners, any(x.attended for x in here), via))
        return tuple(values)

    def _scan(self, eqn: Any, inputs: list[_Row]) -> list[_Row]:
        body, fixed, carried = (eqn.params[key] for key in ("jaxpr", "num_consts", "num_carry"))
        constants, carry, xs = inputs[:fixed], inputs[fixed : fixed + carried], inputs[fixed + carried :]
        if len(eqn.outvars) > carried:
            raise NotImplementedError(
                "trace: loops that stack nothing; got a scan with outputs for each step."
            )
        for _ in range(eqn.params["length"]):
            out = self.run(body.jaxpr, [self._nothing] * len(body.consts), [*constants, *carry, *xs])
            ended = [max(x[device].ready for x in out) for device in self.devices]
            carry = [_at(ended, row) for row in out]
        return list(carry)

    def _attend(self, eqn: Any, inputs: list[_Row]) -> list[_Row]:
        q, k = (x.aval.shape for x in eqn.invars[:2])
        # The whole is all queries by all keys, in a device's share of the heads.
        num = len(self.devices)
        work = q[1] * k[1] * q[2] / (num * num * self.num_heads / num)
        out = []
        for device in self.devices:
            here = {"q": inputs[0][device], "kv": self._joined(inputs[1:])[device]}
            for name, x in here.items():
                for number in x.via:
                    self.carried[number].add(name)
            start = max(self.free.get((device, "attention"), 0.0), *(x.ready for x in here.values()))
            self.free[device, "attention"] = start + work
            owners = {name: x.owners for name, x in here.items()}
            self.events.append(Event(device, "attention", start, start + work, owners))
            out.append(_Value(start + work, owners["q"], attended=True))
        return [tuple(out)] * 2

    def _collective(self, eqn: Any, rows: _Row) -> _Row:
        """Of all devices of an axis, which start together."""
        name = eqn.params["axis_name"]
        names = name if isinstance(name, tuple) else (name,)
        sources: dict[int, tuple[int, ...]] = {}
        for group in self._groups(names):
            if eqn.primitive.name == "ppermute":
                sources.update({group[to]: (group[of],) for of, to in eqn.params["perm"]})
            else:
                sources.update({device: tuple(group) for device in group})
        shares = math.prod(eqn.invars[0].aval.shape) / self.num_heads
        out: list[_Value] = list(rows)
        for group in self._groups(names):
            self._transfer(group, rows, sources, shares, out)
        return tuple(out)

    def _transfer(
        self,
        group: list[int],
        rows: _Row,
        sources: dict[int, tuple[int, ...]],
        shares: float,
        out: list[_Value],
    ) -> None:
        each = {device: shares / len(sources[device]) for device in group}
        away = {d: [s for s in sources[d] if s != d] for d in group}
        across = {d: each[d] * sum(map(partial(self._apart, d), away[d])) for d in group}
        unit: Unit = "across" if any(across.values()) else "inside"
        start = max(max(rows[d].ready, self.free.get((d, unit), 0.0)) for d in group)
        for device in group:
            inside = each[device] * len(away[device]) - across[device]
            stop = start + max(inside * self.speeds.inside, across[device] * self.speeds.across)
            number = len(self.events)
            arriving = _union(rows[s].owners for s in away[device])
            self.carried[number] = {"o"} if rows[device].attended else set()
            self.free[device, unit] = stop
            here = [rows[s] for s in sources[device]]
            via = _union(x.via for x in here) | {number}
            out[device] = _Value(stop, _union(x.owners for x in here), rows[device].attended, via)
            lane: Unit = "across" if across[device] else "inside"
            sent = Event(device, lane, start, stop, {"rows": arriving}, tuple(away[device]), across[device])
            self.events.append(sent)

    def _apart(self, a: int, b: int) -> bool:
        return a // self.devices_per_machine != b // self.devices_per_machine

    def _groups(self, names: tuple[str, ...]) -> list[list[int]]:
        """Devices that differ along these axes only, in the order of the axes."""
        grid = np.arange(len(self.devices)).reshape(tuple(self.axes.values()))
        order = list(self.axes)
        last = [order.index(name) for name in names]
        others = [i for i in range(len(order)) if i not in last]
        size = math.prod(self.axes[name] for name in names)
        return grid.transpose(*others, *last).reshape(-1, size).tolist()


def _at(times: Sequence[float], row: _Row) -> _Row:
    return tuple(replace(x, ready=time) for time, x in zip(times, row, strict=True))


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset(itertools.chain.from_iterable(sets))
