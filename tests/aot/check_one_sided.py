"""What the CUDA compiler makes of zero-copy collectives and one-sided kernels: needs JAX's CUDA wheels and no GPU.

Not collected by pytest (its name): `make aot` runs it, or `python -m pytest tests/aot/check_one_sided.py`.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments._aot_compiler import target_devices
from experiments._aot_gpus import load_gpu, parse_machines
from parallel import (
    MosaicPuts,
    XlaBlockAttention,
    one_sided_all_to_all,
    one_sided_ring_attention,
    ring_attention,
    torus_attention,
    ulysses_attention,
    zero_copy_options,
)

BLOCK = XlaBlockAttention()
TORUS = {"machine_axis": "m", "ulysses_axis": "x", "ring_axis": ()}
# Algorithm, machines x GPUs.
ATTENTIONS = {
    "ulysses": (partial(ulysses_attention, axis_name="x"), (1, 8)),
    "ring": (partial(ring_attention, axis_name="x"), (1, 8)),
    "torus": (partial(torus_attention, **TORUS), (2, 8)),
}
# Of a device: 512 rows of 16 heads of 64, 1 MiB.
LENGTH, HEADS, DIM = 512, 16, 64
ROWS_BYTES = 2 * LENGTH * HEADS * DIM
_START = re.compile(r" = (?P<shapes>\S.*?) (?P<kind>all-to-all|collective-permute)(?P<start>-start)?\(")
_SHAPE = re.compile(r"[a-z]+[0-9]+\[[0-9,]+\]\{(?P<layout>[^}]*)\}")


def h100_mesh(machines: int, gpus: int) -> Mesh:
    devices = target_devices(load_gpu("h100"), parse_machines(f"{machines}x{gpus}"))
    return Mesh(np.array(devices).reshape(machines, gpus), ("m", "x"))


def compiled(function, mesh, shapes, *, axes=("m", "x"), options=None):
    """Of per-device arrays along `axes` of their length."""
    spec = P(None, axes)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    sharding = NamedSharding(mesh, spec)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
    return jax.jit(mapped, compiler_options=options).lower(*args).compile()


def transfers(text: str) -> list[tuple[str, list[str]]]:
    """Kind of every all-to-all and permute, and the layouts of its buffers."""
    found = []
    for line in text.splitlines():
        start = _START.search(line)
        if start:
            found.append((start["kind"], [shape["layout"] for shape in _SHAPE.finditer(start["shapes"])]))
    return found


@pytest.fixture(scope="module", params=ATTENTIONS)
def with_and_without(request):
    """Value and gradient of an attention, with zero-copy options and without."""
    attention, machines = ATTENTIONS[request.param]
    mesh = h100_mesh(*machines)

    def value_and_gradient(q, k, v, d_out):
        out, pullback = jax.vjp(lambda *qkv: attention(*qkv, block_attention=BLOCK), q, k, v)
        return out, *pullback(d_out)

    shapes = [(1, LENGTH * mesh.size, HEADS, DIM)] * 4
    build = partial(compiled, value_and_gradient, mesh, shapes)
    return build(options=zero_copy_options()), build(), build(options=zero_copy_options(symmetric=False))


def test_every_buffer_of_a_transfer_is_in_collective_memory(with_and_without):
    zero_copy, plain, registered = (transfers(program.as_text()) for program in with_and_without)
    assert len(plain) >= 4
    assert not any("S(1)" in layout for _, layouts in plain for layout in layouts)
    for found in (zero_copy, registered):
        assert [kind for kind, _ in found] == [kind for kind, _ in plain]
        assert all(len(layouts) >= 2 for _, layouts in found), "an operand and a result each"
        assert all("S(1)" in layout for _, layouts in found for layout in layouts)


def test_zero_copy_costs_the_buffers_of_a_transfer_and_no_copies(with_and_without):
    """Other temporaries do not share collective memory: 6 MiB more for Ulysses, 12 for the ring, 6.5 for Torus.

    They are sent and received: q, k, v and the output; of the ring k, v and their gradients, in float32.
    """
    zero_copy, plain, _ = with_and_without
    sizes = [program.memory_analysis().temp_size_in_bytes for program in (zero_copy, plain)]
    is_ring = {kind for kind, _ in transfers(plain.as_text())} == {"collective-permute"}
    buffers = 2 * (2 + 2 * 2) if is_ring else 2 * 4
    assert sizes[0] - sizes[1] <= buffers * ROWS_BYTES
    copies = [len(re.findall(r" = \S+ copy\(", program.as_text())) for program in (zero_copy, plain)]
    assert copies[0] <= copies[1]


def test_unknown_options_would_be_refused():
    with pytest.raises(Exception, match="xla_gpu_zero_copies"):
        compiled(lambda x: x, h100_mesh(1, 8), [(1, 8, 1, 1)], options={"xla_gpu_zero_copies": True})


EXCHANGE = partial(one_sided_all_to_all, split_axis=2, concat_axis=1, puts=MosaicPuts())


@pytest.fixture
def assembled(monkeypatch, tmp_path):
    """PTX of the kernels that a test compiles, once the assembler has made code for Hopper of it."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")

    def read() -> list[str]:
        logs = [path.read_text() for path in tmp_path.glob("*.ptxas")]
        assert logs
        for log in logs:
            assert re.search(r"Compiling entry function '\w+' for 'sm_90a'", log)
            assert "0 bytes spill stores, 0 bytes spill loads" in log
        return [path.read_text() for path in tmp_path.glob("*.ptx")]

    return read


@pytest.mark.parametrize(
    ("machines", "axis_name"),
    [((1, 8), "x"), ((1, 8), ("m", "x")), ((2, 4), "x")],
    ids=["8", "two axes as one", "4 of 2 x 4"],
)
def test_exchange_compiles(machines, axis_name, assembled):
    """There and back: 500 rows of 24 heads a device, a part that is not whole tiles."""
    mesh = h100_mesh(*machines)

    def there_and_back(x):
        out, pullback = jax.vjp(partial(EXCHANGE, axis_name=axis_name), x)
        return out, pullback(out)[0]

    text = compiled(there_and_back, mesh, [(1, 500 * mesh.size, 24, 64)]).as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 2
    assert "all-to-all" not in text
    for ptx in assembled():
        assert "st.global.v4.b32" in ptx, "16 bytes a thread"
        assert "red.release.sys.global.add" in ptx, "a signal makes what was put before visible to the peer"
        assert "fence.acquire.sys" in ptx


@pytest.mark.parametrize(("kv_heads", "dim"), [(24, 128), (8, 64)])
def test_ring_compiles(kv_heads, dim, assembled):
    """Forward: one kernel, and no collective."""
    attend = partial(one_sided_ring_attention, axis_name="x", puts=MosaicPuts(), block_attention=BLOCK)
    shapes = [(1, 8 * 512, 24, dim), *[(1, 8 * 512, kv_heads, dim)] * 2]
    text = compiled(attend, h100_mesh(1, 8), shapes).as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 1
    assert "collective-permute" not in text
    (ptx,) = assembled()
    puts = ptx.count("cp.async.bulk.global.shared")
    assert puts > 0, "by the copy engine"
    assert puts % 7 == 0, "as many in each step but the last"
    assert "wgmma.mma_async" in ptx
    assert "red.release.sys.global.add" in ptx
