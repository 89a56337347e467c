"""Independent references for sequence-parallel attention: the whole sequence at once, in NumPy and float64."""

from typing import Any, NamedTuple

import numpy as np


class Joint(NamedTuple):
    """Attention of a whole sequence, and of the text that takes part in it, with the gradients of all that enters.

    Attributes:
        out, lse: of the sequence, (b, l_q, h, d) and (b, l_q, h).
        text_out: of the text, or None.
        gradients: of q, k, v, and with text of its q, k, v.
    """

    out: np.ndarray
    lse: np.ndarray
    text_out: np.ndarray | None
    gradients: tuple[np.ndarray, ...]


def joint_attention(
    qkv: Any,
    d_out: Any,
    *,
    ids: Any = None,
    causal: bool = False,
    text: Any = None,
    text_ids: Any = None,
    d_text: Any = None,
    scale: float | None = None,
) -> Joint:
    """Softmax attention over [text; sequence] by definition, one batch entry and head at a time.

    `ids` is a pair of query and key ids, (b, l); `text` is (q, k, v) of the text, which comes first.
    """
    q, k, v = (np.asarray(x, np.float64) for x in qkv)
    d_out = np.asarray(d_out, np.float64)
    b, l_q, heads, dim = q.shape
    l_k, length = k.shape[1], 0
    q_ids, k_ids = (np.ones((b, l_q)), np.ones((b, l_k))) if ids is None else map(np.asarray, ids)
    if text is not None:
        q, k, v = (
            np.concatenate([np.asarray(t, np.float64), x], 1) for t, x in zip(text, (q, k, v), strict=True)
        )
        d_out = np.concatenate([np.asarray(d_text, np.float64), d_out], 1)
        length = q.shape[1] - l_q
        of_text = np.ones((b, length)) if text_ids is None else np.asarray(text_ids)
        q_ids, k_ids = (np.concatenate([of_text, x], 1) for x in (q_ids, k_ids))
    scale = dim**-0.5 if scale is None else scale
    group = heads // k.shape[2]
    out, lse, grads = np.zeros_like(q), np.zeros(q.shape[:3]), [np.zeros_like(x) for x in (q, k, v)]
    for n in range(b):
        mask = (q_ids[n][:, None] == k_ids[n][None]) & (q_ids[n] > 0)[:, None]
        if causal:
            mask &= np.arange(q.shape[1])[:, None] >= np.arange(k.shape[1])[None]
        for h in range(heads):
            of_head = q[n, :, h], k[n, :, h // group], v[n, :, h // group]
            out[n, :, h], lse[n, :, h], weights = _softmax(*of_head, mask, scale)
            for total, part, head in zip(
                grads,
                _gradients(*of_head, weights, d_out[n, :, h], scale),
                (h, h // group, h // group),
                strict=True,
            ):
                total[n, :, head] += part
    if text is None:
        return Joint(out, lse, None, tuple(grads))
    parts = [g[:, length:] for g in grads] + [g[:, :length] for g in grads]
    return Joint(out[:, length:], lse[:, length:], out[:, :length], tuple(parts))


def _softmax(q: Any, k: Any, v: Any, mask: Any, scale: float) -> tuple[Any, Any, Any]:
    logits = np.where(mask, np.where(mask, q @ k.T, 0.0) * scale, -np.inf)
    some = mask.any(1)
    top = np.where(some, logits.max(1, initial=-np.inf), 0.0)
    weights = np.exp(logits - top[:, None])
    total = np.where(some, weights.sum(1), 1.0)
    lse = np.where(some, top + np.log(total), -np.inf)
    weights = weights / total[:, None]
    return weights @ v, lse, weights


def _gradients(q: Any, k: Any, v: Any, weights: Any, d_out: Any, scale: float) -> tuple[Any, Any, Any]:
    d_weights = d_out @ v.T
    d_logits = weights * (d_weights - (weights * d_weights).sum(1, keepdims=True)) * scale
    return d_logits @ k, d_logits.T @ q, weights.T @ d_out
