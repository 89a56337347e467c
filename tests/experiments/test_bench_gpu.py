"""Benchmarks and compile report of the GPU kernels: what they count, and that they run, at tiny sizes on CPU."""

import importlib.util
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments import bench_gpu
from experiments._bench_gpu_attention import (
    AttentionSizes,
    attention_flops,
    batches,
    bench_gpu_attention,
    device_segments,
)
from experiments._bench_gpu_block import bench_gpu_block, block_flops, peak_flops
from experiments._bench_gpu_exchange import bench_gpu_exchange
from experiments._kernel_report import find_ptxas, kernel_call, read_dump
from experiments._program import UserError
from parallel import KernelTiles, PallasKernel, Tiles
from parallel._tiles import TILE_TABLE


@pytest.fixture
def _quick():
    # That the sections run and count is what is tested, not how fast: compiling takes nearly all of the time.
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def test_operations_by_hand():
    assert attention_flops([2, 3], num_heads=5, head_dim=7) == 4 * 7 * 5 * (4 + 9)
    assert block_flops(10, 4) == 24 * 10 * 16 + 4 * 100 * 4
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("cpu") is None


def test_batches_fill_their_tokens():
    sizes = AttentionSizes()
    found = batches(sizes)
    assert found["65536"] == [65536]
    assert all(sum(lengths) == sizes.total for name, lengths in found.items() if name != "65536")
    assert len(set(found["joint mix"])) > 5
    assert max(found["joint mix"]) <= 65536


def test_every_head_of_every_sequence_is_a_segment():
    segments = device_segments([5, 9], 3, 16)
    ids, counts = np.unique(np.asarray(segments.query_ids), return_counts=True)
    assert ids.tolist() == list(range(7))
    assert sorted(counts[1:].tolist()) == [5, 5, 5, 9, 9, 9]


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(None, marks=pytest.mark.full),
        pytest.param(
            PallasKernel(KernelTiles(*[Tiles(16, 16, 4, 2)] * 3), interpret=True), marks=pytest.mark.full
        ),
    ],
    ids=["platform", "interpreted"],
)
def test_attention_section(kernel):
    section = bench_gpu_attention(quick=True, kernel=kernel)
    forms = [(m["batch"], m["form"]) for m in section.figures["measured"]]
    assert [f for f in forms if f[0] == "48"] == [
        ("48", form) for form in ("packed", "plain JAX", "one length (cuDNN)")
    ]
    assert ("joint mix", "one length (cuDNN)") not in forms
    assert all(m["forward_backward_tflops"] > 0 for m in section.figures["measured"])
    assert len(section.body.splitlines()) > len(forms)
    assert json.dumps(section.figures)
    assert section.figures["repeats_exactly"]
    assert len(section.figures["largest_difference"]) == 4
    assert max(section.figures["largest_difference"]) < 2e-2


@pytest.mark.usefixtures("_quick")
def test_block_and_exchange_sections():
    (measured,) = bench_gpu_block(quick=True).figures["measured"]
    assert measured["model_tflops"] > 0
    assert measured["mfu"] is None
    (measured,) = bench_gpu_exchange(quick=True).figures["measured"]
    # 8 heads over 8 devices: of its 32-token sequence each keeps one head and sends seven; q, k and v of 8 channels.
    assert measured["sent_bytes"] == 7 * 32 * 3 * 8 * 2
    assert jax.device_count() == 8


def test_program_needs_a_gpu_and_knows_its_sections():
    with pytest.raises(UserError, match="need a GPU, and JAX sees none"):
        bench_gpu.main([])
    with pytest.raises(UserError, match="sections of attention, block, exchange; got 'speed'"):
        bench_gpu.main(["--only", "attention,speed"])


# The compile report.


def test_every_kernel_of_the_table_lowers_for_cuda():
    for head_dim, dtype in TILE_TABLE:
        for direction in KernelTiles.__dataclass_fields__:
            call, args = kernel_call(head_dim, dtype, direction)
            text = jax.jit(call).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
            assert text.count(f'name = "packed_attention_{direction}"') == 1


PTX = """.version 8.7
.target sm_90a
.visible .entry packed_attention_forward()
wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {};
wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {};
mma.sync.aligned.m16n8k16 {};
"""
PTXAS = """#!/bin/sh
test "$*" = "-v -arch sm_90a $4 -o /dev/null" || exit 1
echo "    0 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads" >&2
echo "ptxas info    : Used 166 registers, used 1 barriers" >&2
"""


def test_figures_are_read_from_what_the_compiler_leaves(tmp_path):
    ptxas = tmp_path / "ptxas"
    ptxas.write_text(PTXAS)
    ptxas.chmod(0o755)
    (tmp_path / "m.1.ptx").write_text(PTX)
    (tmp_path / "m.2.ptx").write_text("")
    with pytest.raises(UserError, match="must hold one kernel; got 1 PTX files and 0 launches"):
        read_dump(tmp_path, ptxas)
    (tmp_path / "m.thunk_sequence.txt").write_text("001: kCustomKernel x shared_memory: 131584 bytes\n")
    assert read_dump(tmp_path, ptxas) == {
        "registers": 166,
        "spill_bytes": 36,
        "shared_bytes": 131584,
        "wgmma": 2,
        "mma": 1,
    }


@pytest.mark.skipif(importlib.util.find_spec("nvidia") is not None, reason="CUDA wheels are installed")
def test_report_says_what_is_missing(tmp_path):
    with pytest.raises(UserError, match=r"needs JAX's CUDA wheels .* pip install 'jaxdit\[cuda12\]'"):
        find_ptxas()
    target = tmp_path / "gpu.txtpb"
    target.write_text("")
    command = [sys.executable, "-m", "experiments._kernel_report", "--target", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the kernel report needs JAX's CUDA wheels")
