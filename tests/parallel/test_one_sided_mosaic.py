"""The attention inside the GPUs' ring kernel, in Pallas' GPU interpreter: copies, barriers and loops as they are.

The interpreter has no transposed operands and no layouts of registers: products of tensor cores are plain JAX here.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from parallel import _one_sided_mosaic_attention as kernel
from parallel._online_softmax import Partial
from tests.oracles import close
from tests.oracles_sequence import joint_attention
from tests.parallel.sequence_cases import BF16, F32


class Accumulator:
    """Of products, in place of tensor cores'."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, _: Any) -> Any:
        return self.value

    @staticmethod
    def begin(shape: tuple[int, ...], dtype: Any) -> "Accumulator":
        return Accumulator(jnp.zeros(shape, dtype))


def wgmma(acc: Accumulator, a: Any, b: Any) -> None:
    b = b() if callable(b) else b[...]
    acc.value = acc.value + jnp.dot(a[...], b, preferred_element_type=jnp.float32)


def run_state(function: Any) -> Any:
    def run(acc: Accumulator) -> Any:
        function(acc)
        return acc.value

    return run


@pytest.fixture
def interpreter(monkeypatch):
    """The interpreter's parameters; it is not public in all releases."""
    params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
    run_scoped = pl.run_scoped

    def scoped(function: Any, *scratch: Any) -> Any:
        if isinstance(scratch[0], Accumulator):
            return function(*scratch)
        return run_scoped(function, *scratch)

    accumulator = Accumulator.begin
    accumulator.init = Accumulator
    monkeypatch.setattr(pl, "run_scoped", scoped)
    monkeypatch.setattr(pl, "run_state", run_state)
    monkeypatch.setattr(plgpu, "ACC", accumulator)
    monkeypatch.setattr(plgpu, "wgmma", wgmma)
    monkeypatch.setattr(plgpu, "transpose_ref", lambda ref, _: lambda: ref[...].T)
    monkeypatch.setattr(plgpu, "layout_cast", lambda x, _: x)
    monkeypatch.setattr(plgpu, "load", lambda ref, *_, **__: ref[...])
    return params.InterpretGPUParams()


@pytest.mark.full
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (2, 2, 128)])
def test_two_steps_are_attention_to_the_keys_of_both(interpreter, heads, kv_heads, dim):
    """One worker, two batches, two tiles of queries, three of keys a step."""
    batch, length, keys = 2, 2 * kernel.QUERIES, 3 * kernel.KEYS
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((batch, length, heads, dim)), jnp.bfloat16)
    steps = jnp.asarray(rng.standard_normal((2, 2, batch, keys, kv_heads, dim)), jnp.bfloat16)

    def attend(q_ref, first_ref, second_ref, out_ref, lse_ref):
        attention, total = kernel.Attention(dim**-0.5, 0, 1), Partial(out_ref, lse_ref)
        kernel.attend_tiles(attention, q_ref, first_ref, total, is_first=True)
        kernel.attend_tiles(attention, q_ref, second_ref, total, is_first=False)

    results = [
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
        jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
    ]
    out, lse = plgpu.kernel(attend, out_type=results, interpret=interpreter)(q, *steps)
    k, v = (np.asarray(jnp.concatenate([*steps[:, part]], axis=1)) for part in range(2))
    close(out, joint_attention((np.asarray(q), k, v), np.zeros(q.shape)).out, BF16)
    logits = np.einsum("bqhd,bkhd->bhqk", *(np.float64(x) for x in (q, k.repeat(heads // kv_heads, 2))))
    close(lse, np.log(np.exp(logits * dim**-0.5).sum(-1)), F32)
