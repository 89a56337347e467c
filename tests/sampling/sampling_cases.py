"""Small models, and requests of several sizes, for tests of sampling."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdit.models import DiT, DiTConfig, ImageLabelRows, ImageTextRows, MMDiT, MMDiTConfig
from jaxdit.sampling._denoiser import Conditions
from tests.oracles_models import masked_attention

CHANNELS, TEXT_CHANNELS, POOLED = 6, 7, 4
MMDIT = MMDiTConfig(
    in_channels=CHANNELS,
    text_channels=TEXT_CHANNELS,
    pooled_channels=POOLED,
    width=32,
    num_heads=4,
    num_double_blocks=1,
    num_single_blocks=2,
    axes_dim=(2, 2, 4),
    compute_dtype="float32",
)
DIT = DiTConfig(
    patch_size=1,
    channels=CHANNELS,
    width=32,
    num_heads=4,
    depth=2,
    num_classes=5,
    compute_dtype="float32",
)


def make(kind, config):
    """(abstract module, parameters without zeros)."""
    build = lambda: kind(config, rngs=nnx.Rngs(0))  # noqa: E731
    params = nnx.to_pure_dict(nnx.state(build(), nnx.Param))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + jnp.asarray(0.2 * rng.normal(size=x.shape), x.dtype), params)
    return nnx.eval_shape(build), params


mmdit = partial(make, MMDiT, MMDIT)
dit = partial(make, DiT, DIT)


def conditions(requests, branches, text, *, seed=0, scale=3.0):
    """Random text of the given lengths (branches, requests)."""
    rng = np.random.default_rng(seed)
    text = np.asarray(text, np.int32).reshape(branches, requests)
    return Conditions(
        text=jnp.asarray(
            rng.normal(size=(branches, requests, max(text.max(), 1), TEXT_CHANNELS)), jnp.float32
        ),
        text_lengths=jnp.asarray(text),
        pooled=jnp.asarray(rng.normal(size=(branches, requests, POOLED)), jnp.float32),
        labels=None,
        embedded_guidance=None,
        scale=jnp.full(requests, scale, jnp.float32),
    )


def labels(requests, branches, *, scale=3.0):
    """Classes, and the null class without."""
    of = jnp.stack([jnp.arange(requests) % 5, jnp.full(requests, 5)])[:branches]
    zeros = jnp.zeros((branches, requests), jnp.int32)
    return Conditions(None, zeros, None, of, None, jnp.full(requests, scale, jnp.float32))


def expected(module, params, given, grids, table, times):
    """Guided predictions (tokens, c) of every request, all sequences side by side on one device.

    Args:
        module, params: from `make`.
        given: conditions.
        grids: (r, 3).
        table: (r + 1, tokens, c) latents of request r in row r + 1.
        times: (r,).
    """
    counts = np.prod(grids, axis=1)
    sequences = [(branch, request) for branch in range(given.branches) for request in range(len(grids))]
    joined = lambda parts: jnp.asarray(np.concatenate(parts))  # noqa: E731
    ids = joined([np.full(counts[r], s + 1) for s, (_, r) in enumerate(sequences)]).astype(jnp.int32)
    img = joined([table[r + 1, : counts[r]] for _, r in sequences])
    places = joined([np.indices(grids[r]).reshape(3, -1).T for _, r in sequences]).astype(jnp.int32)
    time = jnp.tile(times, given.branches)
    flat = given.flat()

    def run(params):
        model = nnx.merge(nnx.graphdef(module), params)
        if given.labels is not None:
            rows = ImageLabelRows(img, ids, places, time, flat.labels)
            return model(rows, attention=masked_attention(ids))[:, :CHANNELS]
        lengths = np.where(np.tile(counts, given.branches) > 0, flat.text_lengths, 0)
        txt = jnp.concatenate([flat.text[s, :n] for s, n in enumerate(lengths)])
        txt_ids = joined([np.full(n, s + 1) for s, n in enumerate(lengths)]).astype(jnp.int32)
        zeros = jnp.zeros((len(txt), 3), jnp.int32)
        rows = ImageTextRows(img, ids, places, txt, txt_ids, zeros, time, flat.pooled)
        return model(rows, attention=masked_attention(jnp.concatenate([txt_ids, ids])))

    found = np.split(np.asarray(jax.jit(run)(params)), np.cumsum([counts[r] for _, r in sequences])[:-1])
    if given.branches == 1:
        return found
    with_condition, without = found[: len(grids)], found[len(grids) :]
    return [u + s * (c - u) for c, u, s in zip(with_condition, without, np.asarray(given.scale), strict=True)]
