"""The gradient of Torus attention: pull cotangents, push gradients. The schedule is in `_torus_schedule`."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from parallel._block_attention import Attended
from parallel._ring_loop import Gradients, ring_backward
from parallel._torus_parts import (
    Outputs,
    Pulled,
    Rows,
    Saved,
    Torus,
    assembled,
    joined,
    joined_attended,
    pull,
    push,
    push_all,
)


def torus_backward(torus: Torus, saved: Saved, cotangent: Outputs) -> Rows:
    """Gradients of all rows; those of the text are this device's share."""
    state = _Gradients.begin(torus, saved, cotangent)
    for step in backward_steps(torus.machines, is_joined=torus.ring.size > 1 and not torus.causal):
        state.run(step)
    pushed_q = [state.pushed_q[k] for k in range(1, torus.machines)]
    pushed_kv = [state.pushed_kv[k] for k in range(1, torus.machines)]
    dq = assembled(torus, [state.final_q(0), *pushed_q])
    dkv = assembled(torus, [state.final_kv(0), *pushed_kv])
    return Rows(dq, dkv, *state.text_gradients())


class Block(NamedTuple):
    """Parts k of the queries, which attend to part j of the keys at once, in one turn of the ring."""

    queries: tuple[int, ...]
    keys: int

    @property
    def at_same(self) -> bool | None:
        """Whether a device's queries and its keys are the same part of the sequence; None if of some queries."""
        return self.queries[0] == self.keys if len(self.queries) == 1 else None


class Step(NamedTuple):
    """Blocks to compute, and beside them one transfer, if any.

    Attributes:
        pull: k of the cotangents that arrive.
        push_q: those k of the gradients of queries that leave: one, or all in one exchange.
        push_kv: k of the gradients of keys that leave.
    """

    blocks: tuple[Block, ...]
    pull: int = 0
    push_q: tuple[int, ...] = ()
    push_kv: int = 0

    @property
    def has_transfer(self) -> bool:
        """Whether anything moves between machines."""
        return bool(self.pull or self.push_q or self.push_kv)


def backward_steps(machines: int, *, is_joined: bool) -> list[Step]:
    """All pairs of N parts in an order in which every transfer, one at a time, runs beside some of them.

    Each pair alone gives transfers the most to run beside. Where keys go round a ring for every block, and queries can
    be joined to share its turn, 2 N + 1 turns of N^2 are enough.
    """
    if machines == 1:
        return [Step((Block((0,), 0),))]
    return _joined_steps(machines) if is_joined and machines > 2 else _paired_steps(machines)


def _paired_steps(machines: int) -> list[Step]:
    last = machines - 1
    steps = [Step(tuple(Block((0,), j) for j in range(1, machines)), pull=1)]
    for k in range(1, last):
        blocks = [Block((k,), j) for j in (*range(1, machines), 0)]
        half = -(-machines // 2)
        steps.append(Step(tuple(blocks[:half]), pull=k + 1))
        steps.append(Step(tuple(blocks[half:]), push_q=(k - 1,) if k > 1 else ()))
    steps.append(Step((Block((last,), 1),), push_q=(last - 1,) if last > 1 else ()))
    steps += [Step((Block((last,), j),), push_kv=j - 1) for j in range(2, machines)]
    steps.append(Step((Block((last,), 0),), push_kv=last))
    steps.append(Step((Block((0,), 0),), push_q=(last,)))
    return steps


def _joined_steps(machines: int) -> list[Step]:
    last = machines - 1
    every = tuple(range(machines))
    others = every[1:]
    steps = [Step((Block((0,), 1),), pull=1)]
    steps += [Step((Block((k,), 0),), pull=k + 1) for k in range(1, last)]
    steps.append(Step((Block((last,), 0), Block(others, 1))))
    steps += [Step((Block(every, j),), push_kv=j - 1) for j in range(2, last)]
    steps.append(Step((Block(others, last),), push_kv=last - 1))
    steps.append(Step((Block((0,), last),), push_q=others))
    steps.append(Step((Block((0,), 0),), push_kv=last))
    return steps


@dataclass(slots=True)
class _Gradients:
    """Sums of contributions, float32, by part; those of the text are this device's share.

    Attributes:
        source: cotangents of own outputs, of which parts leave.
        attended: results and cotangents of the parts of the queries, as far as these are here.
        dq, dkv: of the parts of queries and keys.
        pushed_q, pushed_kv: what came for own rows, by k.
        text: of the text's queries and keys, or None.
    """

    torus: Torus
    saved: Saved
    source: Array
    attended: list[Attended]
    dq: list[Array]
    dkv: list[Array]
    pushed_q: dict[int, Array] = field(default_factory=dict)
    pushed_kv: dict[int, Array] = field(default_factory=dict)
    text: Gradients | None = None

    @property
    def pulled(self) -> Pulled:
        """What was pulled for the outputs."""
        return self.saved.pulled

    @classmethod
    def begin(cls, torus: Torus, saved: Saved, cotangent: Outputs) -> "_Gradients":
        """Zeros, and what the text's queries contribute."""
        d_text = cotangent.text
        if d_text is not None:
            # Sums over the ring end first: one transfer at a time is hidden.
            d_text = lax.psum(d_text, torus.ring_axis)
            d_text, saved, cotangent = lax.optimization_barrier((d_text, saved, cotangent))
        pulled = saved.pulled
        dq = [jnp.zeros_like(part.q, dtype=jnp.float32) for part in pulled.queries]
        dkv = [jnp.zeros_like(part.kv, dtype=jnp.float32) for part in pulled.keys]
        state = cls(torus, saved, cotangent.out, [], dq, dkv)
        if saved.text is not None and d_text is not None:
            state._add_text(Attended(*saved.text, d_text))
        state._arrived(pull(torus, cotangent.out, 0))
        return state

    def run(self, step: Step) -> None:
        """Start the step's transfer, compute its blocks, and wait for both before anything that follows."""
        moving = self._start(step)
        # One ring after the other, and the last block for the transfer: one transfer at a time is hidden.
        for block in step.blocks[:-1]:
            self._add(block)
            self.attended, self.dq, self.dkv = lax.optimization_barrier((self.attended, self.dq, self.dkv))
        self._add(step.blocks[-1], last_is_free=step.has_transfer)
        here = moving, self.source, self.attended, self.dq, self.dkv
        if not step.has_transfer:
            _, self.source, self.attended, self.dq, self.dkv = lax.optimization_barrier(here)
            return
        # The text's gradients wait too, since they are added up outside.
        here, self.text = lax.optimization_barrier((here, self.text))
        moving, self.source, self.attended, self.dq, self.dkv = here
        if step.pull:
            self._arrived(moving[0])
        elif step.push_q:
            self.pushed_q.update(zip(step.push_q, moving, strict=True))
        else:
            self.pushed_kv[step.push_kv] = moving[0]

    def _start(self, step: Step) -> list[Array]:
        """What the step's transfer brings."""
        if step.pull:
            return [pull(self.torus, self.source, step.pull)]
        if step.push_kv:
            return [push(self.torus, self.final_kv(step.push_kv), step.push_kv)]
        leaving = [self.final_q(k) for k in step.push_q]
        if len(leaving) > 1:
            return push_all(self.torus, leaving)
        return [push(self.torus, x, k) for x, k in zip(leaving, step.push_q, strict=True)]

    def final_q(self, k: int) -> Array:
        """Gradient of part k of the queries, in their dtype."""
        return self.dq[k].astype(self.pulled.queries[k].q.dtype)

    def final_kv(self, k: int) -> Array:
        """Gradient of part k of the keys, in their dtype."""
        return self.dkv[k].astype(self.pulled.keys[k].kv.dtype)

    def _arrived(self, d_out: Array) -> None:
        """Cotangents of the next part of the queries, which attended to the text's keys too."""
        k = len(self.attended)
        self.attended.append(Attended(*self.saved.results[k], d_out))
        if self.text is not None and self.pulled.text_keys is not None:
            queries, text_keys = self.pulled.queries[k], self.pulled.text_keys
            here = self.torus.one.gradients(queries, self.attended[k], text_keys, at_same=False)
            self.dq[k] += here.dq
            self.text = self.text._replace(dkv=self.text.dkv + here.dkv)

    def _add(self, block: Block, *, last_is_free: bool = False) -> None:
        """What the block contributes, with the keys of all devices of the ring."""
        keys = self.pulled.keys[block.keys]
        queries = joined([self.pulled.queries[k] for k in block.queries])
        attended = joined_attended([self.attended[k] for k in block.queries])
        here = ring_backward(
            self.torus.ring,
            queries,
            attended,
            keys,
            at_same=block.at_same,
            last_is_free=last_is_free,
        )
        for k, dq in zip(block.queries, jnp.split(here.dq, len(block.queries), axis=1), strict=True):
            self.dq[k] += dq
        self.dkv[block.keys] += here.dkv

    def _add_text(self, attended: Attended) -> None:
        text, text_keys = self.pulled.text, self.pulled.text_keys
        if text is None or text_keys is None:
            return
        # The text attends to itself on every device of the ring, but only once.
        own = self.torus.one.gradients(text, attended, text_keys, at_same=True)
        first = lax.axis_index(self.torus.ring_axis) == 0
        total = jax.tree.map(lambda x: jnp.where(first, x, 0.0), own)
        for j, keys in enumerate(self.pulled.keys):
            here = self.torus.one.gradients(text, attended, keys, at_same=False)
            total = total._replace(dq=total.dq + here.dq)
            self.dkv[j] += here.dkv
        self.text = total

    def text_gradients(self) -> tuple[Array | None, Array | None]:
        """Of the text's queries and keys, in their dtypes."""
        if self.text is None or self.pulled.text is None or self.pulled.text_keys is None:
            return None, None
        of_queries, of_keys = self.pulled.text.q, self.pulled.text_keys.kv
        return self.text.dq.astype(of_queries.dtype), self.text.dkv.astype(of_keys.dtype)
