"""Attention for models that have no text rows."""

import jax.numpy as jnp
from jaxtyping import Array

from .models import Attention

__all__ = ["image_attention"]


def image_attention(attention: Attention, num_text_rows: int) -> Attention:
    """Attention of a model without text rows, in a layout that has room for some."""
    if not num_text_rows:
        return attention

    def attend(q: Array, k: Array, v: Array) -> Array:
        q, k, v = (jnp.pad(x, ((num_text_rows, 0), (0, 0), (0, 0))) for x in (q, k, v))
        return attention(q, k, v)[num_text_rows:]

    return attend
