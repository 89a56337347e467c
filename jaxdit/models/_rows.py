"""What a model is given: packed rows of all sequences a device holds, and tables indexed by sequence.

A row is one token. `segment_ids` say which sequence a row belongs to: sequence s has id s + 1, and 0 marks a
padding row. Everything that is one vector per sequence (time, pooled text, guidance, label) is a table of S
rows, so it is computed S times and not once per token, wherever the tokens of the sequence lie.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int, Num

__all__ = ["Attention", "ImageLabelRows", "ImageTextRows", "LayerScan"]


class ImageTextRows(NamedTuple):
    """Input of `MMDiT` (per device inside shard_map; the model does not know about devices).

    Attributes:
        img: image rows (patches or latent patches).
        img_segment_ids: sequence of each image row, 0 = padding.
        img_positions: (t, h, w) of each image row.
        txt: text features.
        txt_segment_ids: sequence of each text row, 0 = padding.
        txt_positions: (t, h, w) of each text row; FLUX has zeros.
        time: flow time of each sequence in [0, 1], 0 = data.
        pooled: pooled text vector of each sequence.
        guidance: distilled guidance scale of each sequence, for models with `guidance_embed`; else None.
    """

    img: Float[Array, "n_img c_in"]
    img_segment_ids: Int[Array, " n_img"]
    img_positions: Num[Array, "n_img 3"]
    txt: Float[Array, "n_txt c_txt"]
    txt_segment_ids: Int[Array, " n_txt"]
    txt_positions: Num[Array, "n_txt 3"]
    time: Float[Array, " s"]
    pooled: Float[Array, "s c_pool"]
    guidance: Float[Array, " s"] | None = None


class ImageLabelRows(NamedTuple):
    """Input of `DiT`: as `ImageTextRows`, with a class label per sequence in the place of text.

    Attributes:
        img: image rows.
        img_segment_ids: sequence of each image row, 0 = padding.
        img_positions: (t, h, w) of each image row; t is not encoded.
        time: time of each sequence in [0, 1]; step k of a T-step diffusion has time k / T.
        labels: class of each sequence; `num_classes` is the null class of classifier-free guidance.
    """

    img: Float[Array, "n_img c_in"]
    img_segment_ids: Int[Array, " n_img"]
    img_positions: Num[Array, "n_img 3"]
    time: Float[Array, " s"]
    labels: Int[Array, " s"]


@runtime_checkable
class Attention(Protocol):
    """Attention over packed rows, given to a model as a callable.

    Rows are [text rows; image rows] (a DiT has image rows only), all heads of each. The callable knows which
    rows attend to which and scales by head_dim ** -0.5; it keeps softmax statistics in float32, returns the
    dtype of `v`, and for padding rows any finite value (the model gives them no weight). What it closes over
    must not need a gradient.
    """

    def __call__(
        self, q: Float[Array, "n h d"], k: Float[Array, "n h d"], v: Float[Array, "n h d"], /
    ) -> Float[Array, "n h d"]: ...


LayerScan = Callable[[Callable[[Any, Any, Any], Any], Any, Any, Any], Any]
"""`layer_scan(fn, stacked_params, carry, consts) -> carry`: applies `carry = fn(layer_params, carry, consts)`
for every layer. `stacked_params` is a nested dict of arrays whose leading axis is the layer. What needs a
gradient is in the arguments; `fn` itself closes over segment ids and rotary tables, which need none."""
