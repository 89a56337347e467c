"""The model here on a parity case: all sequences packed into one call, and its distance to the reference."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jaxdit.models import DiT, ImageLabelRows, ImageTextRows, MMDiT
from jaxdit.training import merged
from jaxdit.weights import Lora, add_lora, load_params, read_config
from jaxdit.weights._save import named_tensors
from jaxdit.weights._tables import table_for
from parallel import PackedSegments, packed_attention
from tests.parity.cases import Case, draw_weight, sequences_of

__all__ = [
    "bounds_of",
    "draw_adapters",
    "errors",
    "has_exact_angles",
    "packed_rows_attention",
    "run_ours",
    "write_checkpoint",
]

# Of `errors` in float32.
_BOUNDS = {"output": 1e-5, "input_gradient": 1e-5, "parameter_gradient": 1e-5, "frequency_gradient": 2e-5}
# Where the reference's angles are off, see `Case.guidance`: 1.7e-5 and 8.8e-5 were measured.
_OTHER_GUIDANCE = {"parameter_gradient": 2e-5, "frequency_gradient": 2e-4}


def bounds_of(case: Case) -> dict[str, float]:
    """Bounds of `errors` in float32."""
    return _BOUNDS if has_exact_angles(case) else {**_BOUNDS, **_OTHER_GUIDANCE}


def has_exact_angles(case: Case) -> bool:
    """Whether the reference's frequencies give the angles of its guidance that correctly rounded ones do."""
    return case.config.get("guidance_embeds") is not True or set(case.guidance) <= {3.5, 7.0}


_GAP = 3  # padding rows after every sequence
_BLOCK = 32


def write_checkpoint(case: Case, folder: Path) -> None:
    """A diffusers folder with the weights of a case, made without diffusers."""
    kind = {"flux": "FluxTransformer2DModel", "dit": "DiTTransformer2DModel"}[case.kind]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"_class_name": kind, **case.config}))
    shapes = table_for(read_config(folder), "diffusers").shapes
    tensors = {name: draw_weight(name, shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")


def draw_adapters(config: Any, lora: Lora) -> dict[str, Any]:
    """Random adapters of a FLUX.1 model, none of them zero."""

    def make() -> nnx.Module:
        model = MMDiT(config, rngs=nnx.Rngs(0))
        add_lora(model, config, lora, rngs=nnx.Rngs(0))
        return model

    rng = np.random.default_rng(0)
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(make), nnx.LoRAParam))
    return jax.tree.map(lambda x: (0.3 * rng.standard_normal(x.shape)).astype(np.float32), shapes)


def run_ours(
    case: Case,
    folder: Path,
    compute_dtype: str = "float32",
    adapters: Any = None,
    lora: Lora | None = None,
) -> dict[str, np.ndarray]:
    """As `tests.parity.reference.run_reference`, from a diffusers folder on disk, perhaps with adapters."""
    config = read_config(folder, compute_dtype=compute_dtype)
    params = load_params(folder, config)
    if adapters is not None:
        params = merged(params, adapters)
    packed = _Packed(sequences_of(case))
    if case.kind == "flux":
        rows, attention = _flux_rows(packed, has_guidance=config.guidance_embed)
    else:
        rows, attention = _dit_rows(packed)
    inputs = {name: getattr(rows, name) for name in ("img", "txt", "pooled") if name in rows._fields}
    (d_params, d_inputs), out = _gradients(
        _graph(case, config, lora), params, inputs, rows, attention, packed.along_img("cotangent")
    )
    results = {f"out.{i}": np.asarray(out[where]) for i, where in enumerate(packed.img)}
    for name, value in d_inputs.items():
        parts = {"img": packed.img, "txt": packed.txt}.get(name, range(len(packed.sequences)))
        results |= {f"grad.{name}.{i}": np.asarray(value[where]) for i, where in enumerate(parts)}
    results = {name: value for name, value in results.items() if value.size}
    gradients = [] if lora is not None else named_tensors(d_params, config, "diffusers")
    return results | {f"grad.param.{name}": value for name, value in gradients}


def _graph(case: Case, config: Any, lora: Lora | None) -> Any:
    def make() -> nnx.Module:
        model = (MMDiT if case.kind == "flux" else DiT)(config, rngs=nnx.Rngs(0))
        if lora is not None:
            add_lora(model, config, lora, rngs=nnx.Rngs(0))
        return model

    return nnx.graphdef(nnx.eval_shape(make))


class _Packed:
    """Sequences end to end, with a gap after each: where they lie in image rows and text rows, and arrays of these."""

    def __init__(self, sequences: Any) -> None:
        self.sequences = sequences
        self.img, self.num_img = _ranges([s.img.shape[0] for s in sequences])
        self.txt, self.num_txt = _ranges([s.txt.shape[0] for s in sequences])

    def along_img(self, name: str) -> np.ndarray:
        return _filled([getattr(s, name) for s in self.sequences], self.img, self.num_img)

    def along_txt(self, name: str) -> np.ndarray:
        return _filled([getattr(s, name) for s in self.sequences], self.txt, self.num_txt)

    @property
    def img_ids(self) -> np.ndarray:
        return _segment_ids(self.img, self.num_img)

    @property
    def txt_ids(self) -> np.ndarray:
        return _segment_ids(self.txt, self.num_txt)

    def each(self, name: str, dtype: Any = np.float32) -> np.ndarray:
        return np.array([getattr(s, name) for s in self.sequences], dtype)


def _ranges(lengths: list[int]) -> tuple[list[slice], int]:
    starts = np.cumsum([0, *(length + _GAP for length in lengths)])
    return [slice(int(a), int(a) + n) for a, n in zip(starts[:-1], lengths, strict=True)], int(starts[-1])


def _filled(parts: list[np.ndarray], ranges: list[slice], num_rows: int) -> np.ndarray:
    packed = np.zeros((num_rows, parts[0].shape[1]), parts[0].dtype)
    for part, where in zip(parts, ranges, strict=True):
        packed[where] = part
    return packed


def _segment_ids(ranges: list[slice], num_rows: int) -> np.ndarray:
    found = np.zeros(num_rows, np.int32)
    for i, where in enumerate(ranges):
        found[where] = i + 1
    return found


def _flux_rows(packed: _Packed, *, has_guidance: bool) -> tuple[ImageTextRows, Any]:
    rows = ImageTextRows(
        img=packed.along_img("img"),
        img_segment_ids=packed.img_ids,
        img_positions=packed.along_img("positions"),
        txt=packed.along_txt("txt"),
        txt_segment_ids=packed.txt_ids,
        txt_positions=np.zeros((packed.num_txt, 3), np.int32),
        time=packed.each("time"),
        pooled=np.stack([s.pooled for s in packed.sequences]),
        guidance=packed.each("guidance") if has_guidance else None,
    )
    return rows, packed_rows_attention(np.concatenate([packed.txt_ids, packed.img_ids]))


def _dit_rows(packed: _Packed) -> tuple[ImageLabelRows, Any]:
    rows = ImageLabelRows(
        packed.along_img("img"),
        packed.img_ids,
        packed.along_img("positions"),
        packed.each("time"),
        packed.each("label", np.int32),
    )
    return rows, packed_rows_attention(packed.img_ids)


def _gradients(graph: Any, params: Any, inputs: Any, rows: Any, attention: Any, cotangent: Any) -> Any:
    """((gradients of parameters, of inputs), output)."""

    @jax.jit
    def run(params: Any, inputs: Any, rows: Any) -> Any:
        def total(params: Any, inputs: Any) -> Any:
            out = nnx.merge(graph, params)(rows._replace(**inputs), attention=attention)
            return jnp.sum(out * cotangent), out

        return jax.grad(total, argnums=(0, 1), has_aux=True)(params, inputs)

    return run(params, *jax.tree.map(jnp.asarray, (inputs, rows)))


def packed_rows_attention(ids: np.ndarray, *, block: int = _BLOCK) -> Any:
    """Packed attention of joint rows, all heads in one call: a segment's rows are sorted to be neighbours.

    Args:
        ids: segment of each row, 0 = padding; known when it is traced.
        block: rows of a block.
    """
    order = np.argsort(np.where(ids > 0, ids, ids.max() + 1), kind="stable")
    inverse = np.argsort(order)
    rows = -(-len(ids) // block) * block
    sorted_ids = np.zeros(rows, np.int32)
    sorted_ids[: len(ids)] = ids[order]

    def attention(q: Any, k: Any, v: Any) -> Any:
        num_heads, dim = q.shape[1:]

        def flat(x: Any) -> Any:
            padded = jnp.pad(x[order], ((0, rows - len(ids)), (0, 0), (0, 0)))
            return padded.transpose(1, 0, 2).reshape(num_heads * rows, dim)

        out = packed_attention(flat(q), flat(k), flat(v), _segments(sorted_ids, num_heads, block)).out
        return out.reshape(num_heads, rows, dim).transpose(1, 0, 2)[: len(ids)][inverse]

    return attention


def _segments(ids: np.ndarray, num_heads: int, block: int) -> PackedSegments:
    blocks = ids.reshape(-1, block)
    ranges = []
    for of_block in blocks:
        hits = np.flatnonzero(np.isin(blocks, of_block[of_block > 0]).any(1))
        ranges.append((hits[0], hits[-1] + 1) if len(hits) else (0, 0))
    table, most = np.array(ranges, np.int32), int(ids.max(initial=0))
    heads = np.arange(num_heads, dtype=np.int32)
    all_ids = np.where(ids > 0, ids + most * heads[:, None], 0).reshape(-1).astype(np.int32)
    real = (table[:, 1] > table[:, 0])[:, None]
    all_ranges = np.where(real, table + len(blocks) * heads[:, None, None], 0).reshape(-1, 2).astype(np.int32)
    return PackedSegments(*map(jnp.asarray, (all_ids, all_ids, all_ranges, all_ranges)))


# Gradients of these are products with sines whose angles are off by up to 3e-5 at the times of the cases, see
# `Case.guidance`: 1.7e-5 was measured.
_FREQUENCY_WEIGHTS = ("timestep_embedder.linear_1.weight", "guidance_embedder.linear_1.weight")


def errors(ours: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> dict[str, float]:
    """Largest max|a - b| / max|b| among outputs, gradients of inputs, of parameters, and of those that meet sinusoids.

    A parameter's gradient is measured against a thousandth of the largest if its own is smaller: some are zero by
    construction (a key's bias moves all logits of a row alike).
    """
    # The same embedder is in every DiT block there, and its gradient is summed in the first.
    ours = {name: value for name, value in ours.items() if name in reference or ".norm1.emb." not in name}
    assert ours.keys() == reference.keys(), ours.keys() ^ reference.keys()
    floor = 1e-3 * max(float(np.abs(value).max()) for name, value in reference.items() if ".param." in name)
    worst = {"output": 0.0, "input_gradient": 0.0, "parameter_gradient": 0.0, "frequency_gradient": 0.0}
    for name, value in reference.items():
        size = max(float(np.abs(value).max()), floor if ".param." in name else 0.0)
        group = _group(name)
        worst[group] = max(worst[group], float(np.abs(ours[name] - value).max()) / size)
    return worst


def _group(name: str) -> str:
    if name.startswith("out."):
        return "output"
    if not name.startswith("grad.param."):
        return "input_gradient"
    return "frequency_gradient" if name.endswith(_FREQUENCY_WEIGHTS) else "parameter_gradient"
