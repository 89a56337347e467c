"""Rows on a device and objectives on them, without a mesh."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdit import flow_noised
from jaxdit.encoders import ByteTextEncoder
from jaxdit.schedulers import FlowTimes, euler, integrate
from jaxdit.training import Context, FlowMatching, TextToImage, TokenRows


def rows_of(ids, sequences, num_sequences, channels=4):
    ids = jnp.asarray(ids, jnp.int32)
    rng = np.random.default_rng(0)
    zeros = jnp.zeros(len(ids), jnp.int32)
    return TokenRows(
        img=jnp.asarray(rng.normal(size=(len(ids), channels)), jnp.float32),
        img_segment_ids=ids,
        img_positions=jnp.zeros((len(ids), 3), jnp.int32),
        img_token_index=zeros,
        img_loss_weight=jnp.ones(len(ids)),
        txt=jnp.zeros((0, 8), jnp.int32),
        txt_segment_ids=jnp.zeros(0, jnp.int32),
        txt_token_index=jnp.zeros(0, jnp.int32),
        num_image_tokens=jnp.full(num_sequences, 3, jnp.int32),
        sequences=jnp.asarray(sequences, jnp.int32),
    )


def test_local_ids_number_the_sequences_of_a_device():
    rows = rows_of([7, 7, 0, 2, 5, 0], [2, 5, 7, 0, 0], num_sequences=7)
    assert rows.local_ids(rows.img_segment_ids).tolist() == [3, 3, 0, 1, 2, 0]
    nothing = rows_of([0, 0], [0], num_sequences=7)
    assert nothing.local_ids(nothing.img_segment_ids).tolist() == [0, 0]


class Oracle(TextToImage):
    """Puts out what it was made with, whatever it is asked."""

    def __init__(self, prediction):
        self.prediction = nnx.Variable(prediction)

    def denoise(self, img, time, rows, context, *, guidance):
        return self.prediction[...]


@pytest.mark.parametrize("time", [1e-3, 0.03, 0.05, 0.5, 0.999])
def test_an_exact_prediction_of_the_data_has_no_loss_and_the_last_step_lands_on_it(monkeypatch, time):
    rows = rows_of([1, 1, 2, 0, 3], [1, 2, 3], num_sequences=3)
    objective = FlowMatching(prediction="sample", time_std=None)
    monkeypatch.setattr(FlowMatching, "times", lambda self, rows, context: jnp.full(3, time))
    noise = jnp.asarray(np.random.default_rng(1).normal(size=rows.img.shape), jnp.float32)
    monkeypatch.setattr("jaxdit.training._objectives.token_noise", lambda *args, **kwargs: noise)

    context = Context(attention=None, layer_scan=None, reduce=None, key=None, step=None)
    exact = Oracle(rows.img)
    assert float(objective.loss(exact, rows, context).total) == 0
    assert float(objective.loss(Oracle(rows.img + 0.1), rows, context).total) > 0
    times = jnp.full(3, time)
    noised = flow_noised(rows.img, noise, times, rows.img_segment_ids)
    scheduler = objective.scheduler(euler)
    table = dataclasses.replace(scheduler, times=FlowTimes(first=time)).table(1, np.ones(3, np.int32))
    np.testing.assert_allclose(table.time, times[None])
    landed = integrate(
        lambda x, time: exact.denoise(x, time, rows, context, guidance=None),
        noised,
        table,
        rows.img_segment_ids,
    )
    real = np.flatnonzero(rows.img_segment_ids)
    np.testing.assert_allclose(landed[real], rows.img[real], atol=1e-6)


def test_a_frozen_encoder_with_parameters_is_refused():
    encoder = ByteTextEncoder(text_channels=4, pooled_channels=4, rngs=nnx.Rngs(0))
    encoder.frozen = True
    with pytest.raises(
        NotImplementedError, match=r"got text_encoder=ByteTextEncoder. .* use PrecomputedText"
    ):
        TextToImage(nnx.Module(), encoder)
