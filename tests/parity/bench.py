"""`make bench-torch`: training passes of a 36M-parameter FLUX shape here and in diffusers, side by side on this CPU.

Forward and backward in float32, two threads each, in turn, in one process; medians. Single sequences of 64 text tokens
and 256, 1,024 or 4,096 image tokens; and a mix, packed in one call here, and one by one or padded to the longest there.
Prints one JSON object.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_THREADS = 2
os.environ["OMP_NUM_THREADS"] = str(_THREADS)
if hasattr(os, "sched_setaffinity"):  # XLA takes as many threads as there are cores
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:_THREADS])

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers import FluxTransformer2DModel
from flax import nnx

from experiments._platform import compiler_options, make_mesh
from jaxdit.models import ImageTextRows, MMDiT
from jaxdit.weights import load_params, read_config
from tests.parity.ours import packed_rows_attention

_CONFIG = {
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 4,
    "attention_head_dim": 64,
    "num_attention_heads": 8,
    "joint_attention_dim": 512,
    "pooled_projection_dim": 256,
    "guidance_embeds": False,
    "axes_dims_rope": [8, 28, 28],
}
_TEXT = 64
_SINGLE = (256, 1024, 4096)
_MIX = (256, 256, 576, 1024, 1024, 2304)
_ROUNDS = 3
_BLOCK = 128


def _torch_pass(model: Any, batch: int, tokens: int) -> Callable[[], float]:
    rng = np.random.default_rng(0)
    side = int(np.sqrt(tokens))
    positions = np.stack([np.zeros(tokens), *np.divmod(np.arange(tokens), side)], axis=1)
    arguments = {
        "hidden_states": torch.tensor(rng.standard_normal((batch, tokens, 64)), dtype=torch.float32),
        "encoder_hidden_states": torch.tensor(rng.standard_normal((batch, _TEXT, 512)), dtype=torch.float32),
        "pooled_projections": torch.tensor(rng.standard_normal((batch, 256)), dtype=torch.float32),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": torch.tensor(positions, dtype=torch.float32),
        "txt_ids": torch.zeros(_TEXT, 3),
        "return_dict": False,
    }

    def run() -> float:
        model.zero_grad(set_to_none=True)
        out = model(**arguments)[0]
        out.square().mean().backward()
        return float(out.detach().mean())

    return run


def _our_pass(graph: Any, params: Any, lengths: tuple[int, ...]) -> Callable[[], float]:
    rng = np.random.default_rng(0)
    img = np.repeat(np.arange(1, len(lengths) + 1), lengths).astype(np.int32)
    txt = np.repeat(np.arange(1, len(lengths) + 1), _TEXT).astype(np.int32)
    positions = np.concatenate(
        [np.stack([np.zeros(n), *np.divmod(np.arange(n), int(np.sqrt(n)))], axis=1) for n in lengths]
    )
    rows = ImageTextRows(
        img=rng.standard_normal((len(img), 64)).astype(np.float32),
        img_segment_ids=img,
        img_positions=positions.astype(np.int32),
        txt=rng.standard_normal((len(txt), 512)).astype(np.float32),
        txt_segment_ids=txt,
        txt_positions=np.zeros((len(txt), 3), np.int32),
        time=np.full(len(lengths), 0.5, np.float32),
        pooled=rng.standard_normal((len(lengths), 256)).astype(np.float32),
    )
    attention = packed_rows_attention(np.concatenate([txt, img]), block=_BLOCK)

    def gradients(params: Any, rows: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean(jnp.square(nnx.merge(graph, params)(rows, attention=attention)))

        return jax.value_and_grad(loss)(params)

    # What the programs ask of XLA and of malloc.
    step = jax.jit(gradients, compiler_options=compiler_options(make_mesh(1, 1)))
    placed = jax.tree.map(jnp.asarray, rows)

    def run() -> float:
        return float(jax.block_until_ready(step(params, placed))[0])

    return run


def _medians(passes: dict[str, list[Callable[[], float]]]) -> dict[str, float]:
    """Median seconds of each, measured in turn after one pass that compiles and warms up."""
    times: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(_ROUNDS + 1):
        for name, parts in passes.items():
            start = time.perf_counter()
            for part in parts:
                part()
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(found[1:])) for name, found in times.items()}


def main() -> int:
    """Measure, and print the result.

    Returns:
        The exit code.
    """
    torch.set_num_threads(_THREADS)
    torch.manual_seed(0)
    model = FluxTransformer2DModel(**_CONFIG).train()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = read_config(Path(folder), compute_dtype="float32")
        params = load_params(folder, config)
    graph = nnx.graphdef(nnx.eval_shape(lambda: MMDiT(config, rngs=nnx.Rngs(0))))
    results: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "threads": _THREADS}
    for tokens in _SINGLE:
        found = _medians(
            {"jaxdit": [_our_pass(graph, params, (tokens,))], "torch": [_torch_pass(model, 1, tokens)]}
        )
        results[f"{tokens}"] = {**found, "speed_up": found["torch"] / found["jaxdit"]}
        sys.stderr.write(f"{tokens}: {results[f'{tokens}']}\n")
    mix = _medians(
        {
            "jaxdit_packed": [_our_pass(graph, params, _MIX)],
            "torch_one_by_one": [_torch_pass(model, 1, tokens) for tokens in _MIX],
            "torch_padded": [_torch_pass(model, len(_MIX), max(_MIX))],
        }
    )
    for name in ("one_by_one", "padded"):
        mix[f"speed_up_{name}"] = mix[f"torch_{name}"] / mix["jaxdit_packed"]
    results["mix"] = {"image_tokens": _MIX, **mix}
    sys.stdout.write(json.dumps(results) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
