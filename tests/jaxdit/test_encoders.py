"""Pixels and captions to rows: exact inverses, independence of placement, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxdit.encoders import (
    TOKEN_BYTES,
    ByteTextEncoder,
    Grid,
    ImageEncoder,
    PixelPatches,
    PrecomputedText,
    TextEncoder,
    TextRows,
    byte_tokens,
    patch_grid,
    patch_positions,
    patchify,
    unpatchify,
)

CAPTIONS = ("a handwritten seven", "", "é", "a cat")  # 4, 0, 1 and 2 tokens


@pytest.mark.parametrize("shape", [(1, 4, 6, 3), (5, 2, 2, 1), (3, 8, 2, 4)])
@pytest.mark.parametrize("patch", [1, 2])
def test_patches_go_there_and_back_bit_exactly(shape, patch):
    for dtype in (np.float32, np.uint8):
        pixels = np.random.default_rng(0).integers(0, 255, shape).astype(dtype)
        rows = patchify(pixels, patch)
        grid = patch_grid(shape, patch)
        assert rows.dtype == dtype
        assert rows.shape == (grid.t * grid.h * grid.w, patch * patch * shape[3])
        np.testing.assert_array_equal(unpatchify(rows, grid, patch), pixels)


def test_a_row_is_the_patch_at_its_position_channels_last():
    pixels = np.random.default_rng(0).normal(size=(2, 6, 4, 3))
    rows, positions = patchify(pixels, 2), patch_positions(patch_grid(pixels.shape, 2))
    assert positions.dtype == np.int32
    for row, (t, h, w) in zip(rows, positions, strict=True):
        np.testing.assert_array_equal(row, pixels[t, 2 * h : 2 * h + 2, 2 * w : 2 * w + 2].reshape(-1))
    assert [tuple(p) for p in positions[:4]] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]


def test_pixel_patches_are_an_image_encoder():
    encoder = PixelPatches(2, pixel_channels=3)
    assert isinstance(encoder, ImageEncoder)
    assert (encoder.frozen, encoder.channels) == (True, 12)
    pixels = np.random.default_rng(0).normal(size=(1, 4, 6, 3))
    np.testing.assert_array_equal(encoder.decode(encoder.encode(pixels), Grid(1, 2, 3)), pixels)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"multiples of patch_size; got .*\(1, 7, 4, 3\).* Resize to 8 x 4"):
        patchify(np.zeros((1, 7, 4, 3)), 2)
    with pytest.raises(ValueError, match=r"shape must be \(t, h, w, c\); got shape=\(4, 4, 3\)"):
        patch_grid((4, 4, 3), 2)
    with pytest.raises(ValueError, match="patch_size must be at least 1; got patch_size=0"):
        patch_grid((1, 4, 4, 3), 0)
    with pytest.raises(ValueError, match=r"rows must be t \* h \* w patches .* got rows of shape \(5, 12\)"):
        unpatchify(np.zeros((5, 12)), Grid(1, 2, 3), 2)
    with pytest.raises(ValueError, match=r"got rows of shape \(6, 10\)"):
        unpatchify(np.zeros((6, 10)), Grid(1, 2, 3), 2)
    with pytest.raises(ValueError, match="must be at least 1; got patch_size=0, pixel_channels=3"):
        PixelPatches(0)


def make_encoder(max_length=32):
    return ByteTextEncoder(text_channels=6, pooled_channels=4, max_length=max_length, rngs=nnx.Rngs(0))


def make_rows(captions=CAPTIONS, pad=3, shuffle=True) -> TextRows:
    tokens = [byte_tokens(caption) for caption in captions]
    ids = np.concatenate([*(np.full(len(t), s + 1) for s, t in enumerate(tokens)), np.zeros(pad)])
    index = np.concatenate([*(np.arange(len(t)) for t in tokens), np.zeros(pad)])
    values = np.concatenate([*tokens, np.zeros((pad, TOKEN_BYTES))])
    order = np.random.default_rng(0).permutation(len(ids)) if shuffle else np.arange(len(ids))
    return TextRows(*(jnp.asarray(x[order], jnp.int32) for x in (values, ids, index)))


def test_a_token_holds_a_word_or_eight_bytes_of_it():
    tokens = byte_tokens(" a\thandwritten  seven\n")
    assert tokens.dtype == np.uint8
    assert [token.tobytes().rstrip(b"\0") for token in tokens] == [b"a", b"handwrit", b"ten", b"seven"]
    assert byte_tokens("").shape == byte_tokens(" \n").shape == (0, TOKEN_BYTES)
    assert len(byte_tokens("12345678")) == 1
    assert len(byte_tokens("a\N{NO-BREAK SPACE}b\N{IDEOGRAPHIC SPACE}c")) == 3
    assert byte_tokens("ÄÖÜß€").tobytes() == "ÄÖÜß€".encode().ljust(16, b"\0")


def float64_features(encoder, tokens):
    """The definition of a caption's features."""

    def param(p):
        return np.asarray(p[...], np.float64)

    table = param(encoder.byte_embedding).reshape(TOKEN_BYTES, 256, -1)
    vectors = np.array([sum(table[i, b] for i, b in enumerate(token) if b) for token in tokens])
    vectors = vectors.reshape(len(tokens), -1) + param(encoder.place_embedding)[: len(tokens)]
    hidden = vectors @ param(encoder.mix_in.kernel) + param(encoder.mix_in.bias)
    hidden = hidden / (1 + np.exp(-hidden))
    return vectors + hidden @ param(encoder.mix_out.kernel) + param(encoder.mix_out.bias)


def test_byte_features_and_pooled_vectors_follow_their_definition():
    encoder, rows = make_encoder(), make_rows()
    assert isinstance(encoder, TextEncoder)
    assert not encoder.frozen
    features, pooled = jax.jit(lambda rows: encoder(rows, num_sequences=4))(rows)
    assert features.dtype == pooled.dtype == jnp.float32
    expected = {s: float64_features(encoder, byte_tokens(c)) for s, c in enumerate(CAPTIONS) if c}
    for row, segment, index in zip(features, *(np.asarray(x) for x in rows[1:3]), strict=True):
        wanted = expected[segment - 1][index] if segment else np.zeros(6)
        np.testing.assert_allclose(row, wanted, rtol=1e-5, atol=1e-6)
    kernel, bias = (np.asarray(p[...], np.float64) for p in (encoder.pool.kernel, encoder.pool.bias))
    for s in range(len(CAPTIONS)):
        wanted = encoder.pooled_empty[...][0]
        if s in expected:
            wanted = expected[s].sum(axis=0) / len(expected[s]) ** 0.5 @ kernel + bias
        np.testing.assert_allclose(pooled[s], wanted, rtol=1e-5, atol=1e-6)


def test_a_caption_spread_over_devices_is_pooled_as_a_whole():
    encoder, rows = make_encoder(), make_rows(pad=5)
    assert len(rows.tokens) % 2 == 0
    graph, state = nnx.split(encoder)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def loss(state, rows, reduce=None):
        out = nnx.merge(graph, state)(rows, num_sequences=4, reduce=reduce)
        return out, jnp.sum(jnp.sin(out.features)), jnp.sum(jnp.square(out.pooled))

    def one_device(state):
        out, by_row, by_sequence = loss(state, rows)
        return by_row + by_sequence, out

    def per_device(state, rows):
        out, by_row, by_sequence = loss(state, rows, lambda sums: jax.lax.psum(sums, "d"))
        return jax.lax.psum(by_row, "d") + by_sequence, out.features, out.pooled

    def two_devices(state):
        total, *out = jax.shard_map(
            per_device,
            mesh=mesh,
            in_specs=(P(), TextRows(P("d"), P("d"), P("d"))),
            out_specs=(P(), P("d"), P()),
        )(state, rows)
        return total, tuple(out)

    (one, two) = jax.jit(
        lambda s: tuple(jax.value_and_grad(f, has_aux=True)(s) for f in (one_device, two_devices))
    )(state)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        jax.tree.leaves(one),
        jax.tree.leaves(two),
    )


def test_every_parameter_learns_and_unused_bytes_do_not():
    graph, state = nnx.split(make_encoder())
    rows = make_rows()

    def loss(state):
        out = nnx.merge(graph, state)(rows, num_sequences=4)
        return jnp.sum(jnp.sin(out.features)) + jnp.sum(jnp.square(out.pooled))

    grads = nnx.to_pure_dict(jax.jit(jax.grad(loss))(state))
    used = {(i, b) for c in CAPTIONS for token in byte_tokens(c).tolist() for i, b in enumerate(token) if b}
    learned = np.argwhere(np.any(np.asarray(grads["byte_embedding"]), axis=2))
    assert set(map(tuple, learned.tolist())) == used
    assert np.flatnonzero(np.any(np.asarray(grads["place_embedding"]), axis=1)).tolist() == list(range(4))
    assert np.all(np.asarray(grads["pooled_empty"]) != 0)


def test_a_caption_beyond_the_last_place_is_loud():
    encoder = make_encoder(max_length=4)
    features, _ = encoder(make_rows(("a b c d", "a b c d e"), pad=0, shuffle=False), num_sequences=2)
    assert np.flatnonzero(np.any(np.isnan(np.asarray(features)), axis=1)).tolist() == [8]


def test_no_captions_at_all():
    encoder = make_encoder()
    features, pooled = encoder(make_rows(("", ""), pad=0), num_sequences=2)
    assert features.shape == (0, 6)
    np.testing.assert_array_equal(pooled, np.repeat(encoder.pooled_empty[...], 2, axis=0))


def test_precomputed_text_passes_through():
    encoder = PrecomputedText(text_channels=6, pooled_channels=4)
    assert isinstance(encoder, TextEncoder)
    assert encoder.frozen
    rng = np.random.default_rng(0)
    ids, pooled = jnp.asarray([1, 2, 0], jnp.int32), jnp.asarray(rng.normal(size=(2, 4)), jnp.float32)
    given = rng.normal(size=(3, 6)).astype(np.float32)
    rows = TextRows(jnp.asarray(given), ids, jnp.zeros(3, jnp.int32), pooled)
    out = encoder(rows, num_sequences=2)
    np.testing.assert_array_equal(out.features, given * np.array([[1], [1], [0]]))
    np.testing.assert_array_equal(out.pooled, pooled)
    with pytest.raises(ValueError, match=r"features of 6 channels, .* pooled of shape None"):
        encoder(rows._replace(pooled=None), num_sequences=2)
    with pytest.raises(ValueError, match=r"got tokens of shape \(3, 5\)"):
        encoder(rows._replace(tokens=rows.tokens[:, :5]), num_sequences=2)
    with pytest.raises(ValueError, match=r"pooled must have shape \(3, 4\); got \(2, 4\)"):
        encoder(rows, num_sequences=3)


def test_wrong_tokens_and_sizes_are_refused():
    rows = make_rows()
    for tokens, what in (
        (rows.tokens.astype(jnp.float32), r"dtype float32"),
        (rows.tokens[:, 0], r"dtype int32 and shape \("),
    ):
        with pytest.raises(TypeError, match=rf"tokens must be rows of 8 integers, .* got tokens of {what}"):
            make_encoder()(rows._replace(tokens=tokens), num_sequences=4)
    with pytest.raises(ValueError, match="sizes must be at least 1; got text_channels=0"):
        ByteTextEncoder(text_channels=0, pooled_channels=4, rngs=nnx.Rngs(0))
