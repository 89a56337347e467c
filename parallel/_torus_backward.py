"""The gradient of Torus attention: pull cotangents, push gradients. The schedule is in `_torus_schedule`."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from parallel._block_attention import Attended
from parallel._ring_loop import Gradients, ring_backward
from parallel._torus_parts import Outputs, Pulled, Rows, Saved, Torus, assembled, pull, push


def torus_backward(torus: Torus, saved: Saved, cotangent: Outputs) -> Rows:
    """Gradients of all rows; those of the text are this device's share."""
    state = _Gradients.begin(torus, saved, cotangent)
    for step in backward_steps(torus.machines):
        state.run(step)
    pushed_q = [state.pushed_q[k] for k in range(1, torus.machines)]
    pushed_kv = [state.pushed_kv[k] for k in range(1, torus.machines)]
    dq = assembled(torus, [state.final_q(0), *pushed_q])
    dkv = assembled(torus, [state.final_kv(0), *pushed_kv])
    return Rows(dq, dkv, *state.text_gradients())


class Step(NamedTuple):
    """Pairs (k, j) of parts of queries and keys to compute, and beside them one transfer, if any.

    Attributes:
        pull: k of the cotangents that arrive.
        push_q, push_kv: k of the gradients that leave.
    """

    pairs: tuple[tuple[int, int], ...]
    pull: int = 0
    push_q: int = 0
    push_kv: int = 0


def backward_steps(machines: int) -> list[Step]:
    """All pairs of N parts in an order in which every transfer, one at a time, runs beside some of them."""
    last = machines - 1
    if not last:
        return [Step(((0, 0),))]
    steps = [Step(tuple((0, j) for j in range(1, machines)), pull=1)]
    for k in range(1, last):
        pairs = [(k, j) for j in (*range(1, machines), 0)]
        half = -(-machines // 2)
        steps.append(Step(tuple(pairs[:half]), pull=k + 1))
        steps.append(Step(tuple(pairs[half:]), push_q=k - 1))
    steps.append(Step(((last, 1),), push_q=last - 1))
    steps += [Step(((last, j),), push_kv=j - 1) for j in range(2, machines)]
    steps.append(Step(((last, 0),), push_kv=last))
    steps.append(Step(((0, 0),), push_q=last))
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
        """Start the step's transfer, compute its pairs, and wait for both before anything that follows."""
        moving: Array | None = None
        if step.pull:
            moving = pull(self.torus, self.source, step.pull)
        elif step.push_q:
            moving = push(self.torus, self.final_q(step.push_q), step.push_q)
        elif step.push_kv:
            moving = push(self.torus, self.final_kv(step.push_kv), step.push_kv)
        # One ring after the other, and the last block for the transfer: one transfer at a time is hidden.
        for k, j in step.pairs[:-1]:
            self._add(k, j)
            self.attended, self.dq, self.dkv = lax.optimization_barrier((self.attended, self.dq, self.dkv))
        self._add(*step.pairs[-1], last_is_free=moving is not None)
        here = moving, self.source, self.attended, self.dq, self.dkv
        if moving is None:
            _, self.source, self.attended, self.dq, self.dkv = lax.optimization_barrier(here)
            return
        # The text's gradients wait too, since they are added up outside.
        here, self.text = lax.optimization_barrier((here, self.text))
        moving, self.source, self.attended, self.dq, self.dkv = here
        if step.pull:
            self._arrived(moving)
        elif step.push_q:
            self.pushed_q[step.push_q] = moving
        else:
            self.pushed_kv[step.push_kv] = moving

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
            here = self.torus.one.gradients(self.pulled.queries[k], self.attended[k], self.pulled.text_keys)
            self.dq[k] += here.dq
            self.text = self.text._replace(dkv=self.text.dkv + here.dkv)

    def _add(self, k: int, j: int, *, last_is_free: bool = False) -> None:
        """Part k of the queries and part j of the keys, of all devices of the ring."""
        queries, keys = self.pulled.queries[k], self.pulled.keys[j]
        here = ring_backward(self.torus.ring, queries, self.attended[k], keys, last_is_free=last_is_free)
        self.dq[k] += here.dq
        self.dkv[j] += here.dkv

    def _add_text(self, attended: Attended) -> None:
        text, text_keys = self.pulled.text, self.pulled.text_keys
        if text is None or text_keys is None:
            return
        # The text attends to itself on every device of the ring, but only once.
        own = self.torus.one.gradients(text, attended, text_keys)
        first = lax.axis_index(self.torus.ring_axis) == 0
        total = jax.tree.map(lambda x: jnp.where(first, x, 0.0), own)
        for j, keys in enumerate(self.pulled.keys):
            here = self.torus.one.gradients(text, attended, keys)
            total = total._replace(dq=total.dq + here.dq)
            self.dkv[j] += here.dkv
        self.text = total

    def text_gradients(self) -> tuple[Array | None, Array | None]:
        """Of the text's queries and keys, in their dtypes."""
        if self.text is None or self.pulled.text is None or self.pulled.text_keys is None:
            return None, None
        of_queries, of_keys = self.pulled.text.q, self.pulled.text_keys.kv
        return self.text.dq.astype(of_queries.dtype), self.text.dkv.astype(of_keys.dtype)
