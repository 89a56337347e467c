"""What is sampled: a backbone on packed rows, whatever its conditions are."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._image_attention import image_attention
from .._losses import split_learned_sigma
from ..models import Attention, ImageLabelRows, ImageTextRows


class Conditions(NamedTuple):
    """What predictions depend on besides rows: arrays (branches, requests, ...), the same on every device.

    The branches are those of classifier-free guidance: branch 0 with the condition, branch 1, if there is one, without.

    Attributes:
        text: (g, r, t, c) features of text tokens, those past a caption's length of any value; None for labels.
        text_lengths: (g, r) text tokens.
        pooled: (g, r, c_pool) pooled text vectors; None where the model takes none.
        labels: (g, r) classes; None for text.
        embedded_guidance: (g, r) distilled guidance, for models that embed it; else None.
        scale: (r,) guidance scale: prediction without + scale * (with - without); not read where g is 1.
    """

    text: Any
    text_lengths: Any
    pooled: Any
    labels: Any
    embedded_guidance: Any
    scale: Any

    @property
    def branches(self) -> int:
        """g."""
        return self.text_lengths.shape[0]

    @property
    def text_tokens(self) -> int:
        """t; 0 for labels."""
        return 0 if self.text is None else self.text.shape[2]

    def flat(self) -> "Conditions":
        """Sequences (g * r) for (g, r); the scale stays."""
        merged = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), self._replace(scale=None))
        return merged._replace(scale=self.scale)


class DenoiserRows(NamedTuple):
    """Packed rows of an evaluation on a device, and the conditions of its sequences.

    Attributes:
        img, img_ids, img_positions: image rows, sequence of each plus one (0 is padding), and (t, h, w).
        txt, txt_ids: text rows and their sequences; no rows where the model takes labels.
        time: (s,) of each sequence, 1 is noise.
        conditions: of the sequences, `Conditions.flat`.
    """

    img: Float[Array, "n c"]
    img_ids: Int[Array, " n"]
    img_positions: Int[Array, "n 3"]
    txt: Float[Array, "m c_txt"] | None
    txt_ids: Int[Array, " m"]
    time: Float[Array, " s"]
    conditions: Conditions


@runtime_checkable
class Denoiser(Protocol):
    """What a backbone takes and puts out. Hashable: it is part of a program's key."""

    def inputs(self, rows: DenoiserRows, attention: Attention) -> tuple[Any, Attention]:
        """The backbone's input, and its attention."""
        ...

    def prediction(self, output: Array) -> Float[Array, "n c"]:
        """Prediction for the image rows, float32, of what it puts out."""
        ...


@dataclass(frozen=True, slots=True)
class TextDenoiser:
    """Of an `MMDiT`."""

    def inputs(self, rows: DenoiserRows, attention: Attention) -> tuple[ImageTextRows, Attention]:
        """See `Denoiser`."""
        given = rows.conditions
        assert rows.txt is not None, "a model of text has text features"
        inputs = ImageTextRows(
            img=rows.img,
            img_segment_ids=rows.img_ids,
            img_positions=rows.img_positions,
            txt=rows.txt,
            txt_segment_ids=rows.txt_ids,
            txt_positions=jnp.zeros((rows.txt_ids.shape[0], 3), jnp.int32),
            time=rows.time,
            pooled=given.pooled,
            guidance=given.embedded_guidance,
        )
        return inputs, attention

    def prediction(self, output: Array) -> Float[Array, "n c"]:
        """The backbone's prediction."""
        return output


@dataclass(frozen=True, slots=True)
class LabelDenoiser:
    """Of a class-conditional `DiT`.

    Attributes:
        channels: of a latent pixel, whose noise comes before its variance in the output; None if there is no variance.
    """

    channels: int | None

    def inputs(self, rows: DenoiserRows, attention: Attention) -> tuple[ImageLabelRows, Attention]:
        """See `Denoiser`."""
        inputs = ImageLabelRows(
            img=rows.img,
            img_segment_ids=rows.img_ids,
            img_positions=rows.img_positions,
            time=rows.time,
            labels=rows.conditions.labels,
        )
        return inputs, image_attention(attention, rows.txt_ids.shape[0])

    def prediction(self, output: Array) -> Float[Array, "n c"]:
        """The predicted noise."""
        return output if self.channels is None else split_learned_sigma(output, self.channels).noise


def guided(predictions: Float[Array, "g n c"], scale: Float[Array, " n"]) -> Float[Array, "n c"]:
    """Both branches combined, row by row; of one branch its prediction."""
    if predictions.shape[0] == 1:
        return predictions[0]
    with_condition, without = predictions
    return without + scale[:, None] * (with_condition - without)
