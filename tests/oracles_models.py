"""Independent references for the models: FLUX.1's transformer and DiT, one unpacked sequence at a time.

They follow the originals' structure and parameter names (PyTorch layout, one entry per block), so comparing
with them also checks the documented map of parameters. `xp` is NumPy (float64, for values) or jax.numpy (for
gradients). Nothing here is imported from the models.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


def segment_attention(segment_ids: np.ndarray) -> Any:
    """Attention that runs softmax over each segment by itself; ids are known when it is traced."""
    ids = np.asarray(segment_ids)

    def attention(q: Any, k: Any, v: Any) -> Any:
        out = jnp.zeros_like(v)
        for segment in np.unique(ids[ids > 0]):
            rows = np.flatnonzero(ids == segment)
            qs, ks, vs = (x[rows].astype(jnp.float32) for x in (q, k, v))
            scores = jnp.einsum("qhd,khd->hqk", qs, ks) * q.shape[-1] ** -0.5
            scores = scores - jnp.max(scores, axis=-1, keepdims=True)
            weights = jnp.exp(scores) / jnp.sum(jnp.exp(scores), axis=-1, keepdims=True)
            out = out.at[rows].set(jnp.einsum("hqk,khd->qhd", weights, vs).astype(v.dtype))
        return out

    return attention


def masked_attention(segment_ids: Any) -> Any:
    """Dense attention with a mask made from ids, which may be traced; padding rows give zeros."""
    same = (segment_ids[:, None] == segment_ids[None, :]) & (segment_ids[None, :] > 0)

    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("qhd,khd->hqk", q.astype(jnp.float32), k.astype(jnp.float32))
        scores = jnp.where(same[None], scores * q.shape[-1] ** -0.5, -1e30)
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True)) * same[None]
        weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
        return jnp.einsum("hqk,khd->qhd", weights, v.astype(jnp.float32)).astype(v.dtype)

    return attention


class Weights:
    """Parameters under their original names, and the layers that use them."""

    def __init__(self, named: dict[str, Any], xp: Any) -> None:
        self.named, self.xp = named, xp

    def linear(self, name: str, x: Any) -> Any:
        y = x @ self.named[f"{name}.weight"].T
        return y + self.named[f"{name}.bias"][None, :] if f"{name}.bias" in self.named else y

    def silu(self, x: Any) -> Any:
        return x / (1 + self.xp.exp(-x))

    def gelu(self, x: Any) -> Any:
        return 0.5 * x * (1 + self.xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def layer_norm(self, x: Any) -> Any:
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / self.xp.sqrt(var + 1e-6)

    def modulate(self, x: Any, shift: Any, scale: Any) -> Any:
        return self.layer_norm(x) * (1 + scale) + shift

    def time_embedding(self, t: float, size: int = 256) -> Any:
        # The originals round frequencies and angles to float32, also where the rest is float64.
        exponents = (
            np.float32(-math.log(10000)) * np.arange(size // 2, dtype=np.float32) / np.float32(size // 2)
        )
        args = np.float32(t) * np.exp(exponents.astype(np.float64)).astype(np.float32)
        args = args.astype(np.float64)
        return self.xp.asarray(np.concatenate([np.cos(args), np.sin(args)])[None, :])

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """Heads as a loop; (l, h, d) in, (l, h * d) out."""
        out = []
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head].T / math.sqrt(q.shape[-1])
            weights = self.xp.exp(scores - scores.max(-1, keepdims=True))
            out.append(weights / weights.sum(-1, keepdims=True) @ v[:, head])
        return self.xp.concatenate(out, axis=1)


class Sequence(NamedTuple):
    """One unpacked sequence: what FLUX.1 is given for batch size one (DiT: `vector` is a label, no text)."""

    img: Any
    img_pos: np.ndarray
    txt: Any
    txt_pos: np.ndarray
    time: Any
    vector: Any
    guidance: Any = None


def _rope_matrix(pos: np.ndarray, axes_dim: tuple[int, ...], theta: float) -> np.ndarray:
    """(l, head_dim / 2, 2, 2) rotation matrices in float64."""
    blocks = []
    for axis, dim in enumerate(axes_dim):
        omega = 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
        angle = np.asarray(pos, np.float64)[:, axis, None] * omega[None, :]
        rows = [np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)]
        blocks.append(np.stack(rows, -1).reshape(*angle.shape, 2, 2))
    return np.concatenate(blocks, axis=1)


class _Flux:
    """FLUX.1's blocks on one sequence."""

    def __init__(self, w: Weights, rope: Any, num_txt: int, heads: int) -> None:
        self.w, self.rope, self.heads = w, rope, heads
        self.spans = {"txt": slice(0, num_txt), "img": slice(num_txt, rope.shape[0])}

    def embed(self, name: str, x: Any) -> Any:
        return self.w.linear(f"{name}.out_layer", self.w.silu(self.w.linear(f"{name}.in_layer", x)))

    def rms(self, x: Any, name: str) -> Any:
        mean_square = (x**2).mean(-1, keepdims=True)
        return x / self.w.xp.sqrt(mean_square + 1e-6) * self.w.named[name][None, None, :]

    def turn(self, x: Any, at: slice) -> Any:
        pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
        return self.w.xp.einsum("ljab,lhjb->lhja", self.rope[at], pairs).reshape(x.shape)

    def qkv(self, fused: Any, norm: str, at: slice) -> tuple[Any, Any, Any]:
        split = (fused.shape[0], self.heads, fused.shape[1] // (3 * self.heads))
        q, k, v = (x.reshape(split) for x in self.w.xp.split(fused, 3, axis=1))
        q, k = self.rms(q, f"{norm}.query_norm.scale"), self.rms(k, f"{norm}.key_norm.scale")
        return self.turn(q, at), self.turn(k, at), v

    def double(self, block: str, streams: dict[str, Any], vec: Any) -> dict[str, Any]:
        w, xp = self.w, self.w.xp
        mods = {s: xp.split(w.linear(f"{block}.{s}_mod.lin", w.silu(vec)), 6, axis=1) for s in streams}
        parts = {}
        for s, x in streams.items():
            fused = w.linear(f"{block}.{s}_attn.qkv", w.modulate(x, mods[s][0], mods[s][1]))
            parts[s] = self.qkv(fused, f"{block}.{s}_attn.norm", self.spans[s])
        attn = w.attend(*(xp.concatenate([a, b]) for a, b in zip(parts["txt"], parts["img"], strict=True)))
        out = {}
        for s, x in streams.items():
            x = x + mods[s][2] * w.linear(f"{block}.{s}_attn.proj", attn[self.spans[s]])
            hidden = w.gelu(w.linear(f"{block}.{s}_mlp.0", w.modulate(x, mods[s][3], mods[s][4])))
            out[s] = x + mods[s][5] * w.linear(f"{block}.{s}_mlp.2", hidden)
        return out

    def single(self, block: str, x: Any, vec: Any) -> Any:
        w, width = self.w, x.shape[1]
        shift, scale, gate = w.xp.split(w.linear(f"{block}.modulation.lin", w.silu(vec)), 3, axis=1)
        out = w.linear(f"{block}.linear1", w.modulate(x, shift, scale))
        q, k, v = self.qkv(out[:, : 3 * width], f"{block}.norm", slice(0, x.shape[0]))
        both = w.xp.concatenate([w.attend(q, k, v), w.gelu(out[:, 3 * width :])], axis=1)
        return x + gate * w.linear(f"{block}.linear2", both)


def flux_forward(
    named: dict[str, Any], seq: Sequence, *, heads: int, axes_dim: tuple[int, ...], theta: float, xp: Any
) -> Any:
    """FLUX.1's transformer on one sequence."""
    w, n_txt = Weights(named, xp), seq.txt.shape[0]
    rope = xp.asarray(_rope_matrix(np.concatenate([seq.txt_pos, seq.img_pos]), axes_dim, theta))
    flux = _Flux(w, rope, n_txt, heads)
    vec = flux.embed("time_in", w.time_embedding(1000.0 * seq.time))
    if seq.guidance is not None:
        vec = vec + flux.embed("guidance_in", w.time_embedding(1000.0 * seq.guidance))
    vec = vec + flux.embed("vector_in", seq.vector[None, :])
    streams = {"txt": w.linear("txt_in", seq.txt), "img": w.linear("img_in", seq.img)}
    for i in range(count_blocks(named, "double_blocks")):
        streams = flux.double(f"double_blocks.{i}", streams, vec)
    x = xp.concatenate([streams["txt"], streams["img"]])
    for i in range(count_blocks(named, "single_blocks")):
        x = flux.single(f"single_blocks.{i}", x, vec)
    shift, scale = xp.split(w.linear("final_layer.adaLN_modulation.1", w.silu(vec)), 2, axis=1)
    return w.linear("final_layer.linear", w.modulate(x[n_txt:], shift, scale))


def dit_forward(named: dict[str, Any], seq: Sequence, *, heads: int, xp: Any) -> Any:
    """Peebles & Xie's DiT on one sequence of patches (`vector` is the label, `time` the step)."""
    w = Weights(named, xp)
    width = named["x_embedder.proj.weight"].shape[0]
    vec = w.linear("t_embedder.mlp.0", w.time_embedding(seq.time))
    vec = (
        w.linear("t_embedder.mlp.2", w.silu(vec))
        + named["y_embedder.embedding_table.weight"][seq.vector][None]
    )
    x = w.linear("x_embedder.proj", seq.img) + xp.asarray(_sincos(seq.img_pos, width))
    for i in range(count_blocks(named, "blocks")):
        block = f"blocks.{i}"
        mod = xp.split(w.linear(f"{block}.adaLN_modulation.1", w.silu(vec)), 6, axis=1)
        qkv = w.linear(f"{block}.attn.qkv", w.modulate(x, mod[0], mod[1]))
        q, k, v = (part.reshape(part.shape[0], heads, width // heads) for part in xp.split(qkv, 3, axis=1))
        x = x + mod[2] * w.linear(f"{block}.attn.proj", w.attend(q, k, v))
        hidden = w.gelu(w.linear(f"{block}.mlp.fc1", w.modulate(x, mod[3], mod[4])))
        x = x + mod[5] * w.linear(f"{block}.mlp.fc2", hidden)
    shift, scale = xp.split(w.linear("final_layer.adaLN_modulation.1", w.silu(vec)), 2, axis=1)
    return w.linear("final_layer.linear", w.modulate(x, shift, scale))


def _sincos(pos: np.ndarray, width: int) -> np.ndarray:
    """Column position in the first half of the channels, row position in the second; each sines, cosines."""
    omega = 1.0 / 10000 ** (np.arange(width // 4, dtype=np.float64) / (width / 4.0))
    w, h = (np.einsum("m,d->md", np.asarray(pos, np.float64)[:, axis], omega) for axis in (2, 1))
    return np.concatenate([np.sin(w), np.cos(w), np.sin(h), np.cos(h)], axis=1)


def count_blocks(named: dict[str, Any], kind: str) -> int:
    """Number of blocks of a kind among original parameter names."""
    return len({name.split(".")[1] for name in named if name.startswith(f"{kind}.")})


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(
            _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        )
    return flat


def _torch_layout(name: str, value: Any) -> tuple[str, Any]:
    if name.endswith(".kernel"):
        return name.removesuffix("kernel") + "weight", value.swapaxes(-1, -2)
    return name, value


def _original_names(
    params: dict[str, Any], renames: list[tuple[str, str]], stacks: tuple[str, ...]
) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for path, value in _flatten(params).items():
        stack = next((s for s in stacks if path.startswith(f"{s}.")), None)
        for i in range(value.shape[0] if stack else 1):
            name, array = _torch_layout(path, value[i] if stack else value)
            if stack:
                name = name.replace(f"{stack}.", f"{stack}.{i}.", 1)
            for here, there in renames:
                name = name.replace(here, there)
            named[name] = array
    return named


def flux_names(params: dict[str, Any]) -> dict[str, Any]:
    """An MMDiT's parameters (nested dict) under FLUX.1's names, as the table in its module docstring says."""
    renames = [("final_layer.modulation", "final_layer.adaLN_modulation.1")]
    for s in ("img", "txt"):
        renames += [
            (f".{s}.modulation", f".{s}_mod.lin"),
            (f".{s}.qkv", f".{s}_attn.qkv"),
            (f".{s}.proj", f".{s}_attn.proj"),
            (f".{s}.query_norm", f".{s}_attn.norm.query_norm"),
            (f".{s}.key_norm", f".{s}_attn.norm.key_norm"),
            (f".{s}.mlp.in_layer", f".{s}_mlp.0"),
            (f".{s}.mlp.out_layer", f".{s}_mlp.2"),
        ]
    named = _original_names(params, renames, ("double_blocks", "single_blocks"))
    fixed = {}
    for name, value in named.items():
        if name.startswith("single_blocks"):
            name = name.replace(".modulation.", ".modulation.lin.")
            name = name.replace(".query_norm", ".norm.query_norm").replace(".key_norm", ".norm.key_norm")
        fixed[name] = value
    return fixed


def dit_names(params: dict[str, Any]) -> dict[str, Any]:
    """A DiT's parameters (nested dict) under the original's names; the patch kernel stays flat."""
    renames = [
        ("img_in.", "x_embedder.proj."),
        ("time_in.in_layer", "t_embedder.mlp.0"),
        ("time_in.out_layer", "t_embedder.mlp.2"),
        ("label_in", "y_embedder.embedding_table.weight"),
        (".modulation.", ".adaLN_modulation.1."),
        (".qkv.", ".attn.qkv."),
        (".proj.weight", ".attn.proj.weight"),
        (".proj.bias", ".attn.proj.bias"),
        (".mlp.in_layer", ".mlp.fc1"),
        (".mlp.out_layer", ".mlp.fc2"),
        ("x_embedder.attn.proj", "x_embedder.proj"),
    ]
    return _original_names(params, renames, ("blocks",))


def relative_error(actual: Any, expected: Any) -> float:
    """max |a - b| / max |b| over one array."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.max(np.abs(actual - expected)) / max(np.max(np.abs(expected)), 1e-30))
