"""Rows of a step on a device: as the data loader left them, and as the network works on them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from parallel import Route, exchange, expand_tokens
from solver import StepCapacity, StepTables

AnyArray = jax.Array | np.ndarray

# A label dropped for classifier-free guidance; the objective puts its model's null class there.
NO_LABEL = 1 << 30


class HomeRows(NamedTuple):
    """A micro-batch in home layout: rows where the data loader left them (global arrays have a device axis in front).

    Attributes:
        img, img_segment_ids, img_positions, img_token_index: image rows, sequence of each plus one (0 = padding),
            (t, h, w), and index inside the sequence's image part.
        img_loss_weight: weight of each row in the loss.
        txt: bytes of words (m, 8), see `jaxdit.encoders.byte_tokens`, or features (m, c) of text rows.
        txt_segment_ids, txt_token_index: sequence and index of each text row.
        pooled: text vectors of the sequences at home here, zeros for others; None where text is bytes.
        labels: class of the sequences at home here plus one (-1 where the label is dropped), 0 for others;
            None where the model takes text.
    """

    img: Float[AnyArray, "n c"]
    img_segment_ids: Int[AnyArray, " n"]
    img_positions: Int[AnyArray, "n 3"]
    img_token_index: Int[AnyArray, " n"]
    img_loss_weight: Float[AnyArray, " n"]
    txt: AnyArray
    txt_segment_ids: Int[AnyArray, " m"]
    txt_token_index: Int[AnyArray, " m"]
    pooled: Float[AnyArray, "s c_pool"] | None = None
    labels: Int[AnyArray, " s"] | None = None


class TokenRows(NamedTuple):
    """The same rows in token layout, with tables of all the step's sequences; what an objective is given.

    Attributes are those of `HomeRows`; `pooled` and `labels` hold every sequence (a class, or `NO_LABEL` where it is
    dropped), `num_image_tokens` the image tokens of each, and `sequences` those with rows here, plus one (0 = padding).
    """

    img: Float[Array, "n c"]
    img_segment_ids: Int[Array, " n"]
    img_positions: Int[Array, "n 3"]
    img_token_index: Int[Array, " n"]
    img_loss_weight: Float[Array, " n"]
    txt: Array
    txt_segment_ids: Int[Array, " m"]
    txt_token_index: Int[Array, " m"]
    num_image_tokens: Int[Array, " s"]
    sequences: Int[Array, " l"]
    pooled: Float[Array, "s c_pool"] | None = None
    labels: Int[Array, " s"] | None = None

    def local_ids(self, segment_ids: Int[Array, " n"]) -> Int[Array, " n"]:
        """Segment ids that index `sequences`: a model then computes per-sequence vectors of what is here alone."""
        numbers = jnp.arange(1, self.sequences.shape[0] + 1, dtype=segment_ids.dtype)
        table = jnp.zeros(self.num_image_tokens.shape[0] + 1, segment_ids.dtype)
        return table.at[self.sequences].set(jnp.where(self.sequences > 0, numbers, 0))[segment_ids]


def image_route(tables: StepTables, capacity: StepCapacity) -> Route:
    """The move of image rows from home to token layout (reversed: of results back home)."""
    return expand_tokens(tables, capacity).image


def to_token_layout(
    home: HomeRows,
    tables: StepTables,
    capacity: StepCapacity,
    num_image_tokens: Int[Array, " s"],
    axis_name: Any,
) -> TokenRows:
    """Move a micro-batch from home to token layout.

    Per device, inside `shard_map`. Communication: one exchange per stream and dtype of the rows that change device,
    and the sum of the per-sequence tables.

    Args:
        home: this device's rows.
        tables: this device's tables.
        capacity: the program's capacity.
        num_image_tokens: image tokens of each sequence, the same on every device.
        axis_name: axes of the plan's devices.
    """
    text, image = expand_tokens(tables, capacity)
    img, img_ids, positions, img_index, weight = exchange(
        (home.img, home.img_segment_ids, home.img_positions, home.img_token_index, home.img_loss_weight),
        image,
        axis_name=axis_name,
    )
    txt, txt_ids, txt_index = exchange(
        (home.txt, home.txt_segment_ids, home.txt_token_index), text, axis_name=axis_name
    )

    def total(table: Any) -> Any:
        return None if table is None else jax.lax.psum(table, axis_name)

    labels = total(home.labels)
    return TokenRows(
        img=img,
        img_segment_ids=img_ids,
        img_positions=positions,
        img_token_index=img_index,
        img_loss_weight=weight,
        txt=txt,
        txt_segment_ids=txt_ids,
        txt_token_index=txt_index,
        num_image_tokens=num_image_tokens,
        sequences=jnp.asarray(tables.sequences),
        pooled=total(home.pooled),
        labels=None if labels is None else jnp.where(labels < 0, NO_LABEL, labels - 1),
    )
