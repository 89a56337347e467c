"""The text encoders and tokenizers here on parity cases, and their distance to the reference."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdit.encoders import ClipTextEncoder, T5Encoder, Tokenizer
from jaxdit.weights import load_params, read_config
from tests.parity.text_cases import TEXTS, TOKENIZERS, TextCase, captions_of

__all__ = ["TEXT_BOUNDS", "encoder_of", "run_our_text", "run_our_tokenizers", "text_errors"]

# Of `text_errors` in float32.
TEXT_BOUNDS = {"relative": 1e-5, "absolute": 1e-4}


def encoder_of(folder: Path, compute_dtype: str = "float32") -> Any:
    """The encoder of a folder, loaded."""
    config = read_config(folder, compute_dtype=compute_dtype)
    kind = {"T5Config": T5Encoder, "ClipTextConfig": ClipTextEncoder}[type(config).__name__]
    graph = nnx.graphdef(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graph, load_params(folder, config))


def run_our_text(case: TextCase, folder: Path, compute_dtype: str = "float32") -> dict[str, np.ndarray]:
    """As `tests.parity.text_reference.run_text_reference`, from a folder on disk."""
    model, captions = encoder_of(folder, compute_dtype), captions_of(case)
    ids = jnp.asarray(captions.ids)
    results = {}
    for name, mask in (("unmasked", None), ("masked", jnp.asarray(captions.mask))):
        out = nnx.jit(lambda model, ids, mask: model(ids, mask=mask))(model, ids, mask)
        features, *pooled = out if case.kind == "clip" else (out,)
        results |= {f"{name}.features": features} | {f"{name}.pooled": value for value in pooled}
    return jax.tree.map(np.asarray, results)


def text_errors(ours: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> dict[str, float]:
    """Largest max|a - b| / max|b|, and largest |a - b|, over all results of a case."""
    assert ours.keys() == reference.keys()
    absolute = {name: float(np.abs(ours[name] - value).max()) for name, value in reference.items()}
    relative = [absolute[name] / float(np.abs(value).max()) for name, value in reference.items()]
    return {"relative": max(relative), "absolute": max(absolute.values())}


def run_our_tokenizers(root: Path) -> dict[str, Any]:
    """Ids and masks of all texts by every tokenizer below `root`, cut to its length, as lists."""
    results = {}
    for name, length in TOKENIZERS.items():
        tokens = Tokenizer(root / name, max_length=length, on_long="truncate")(TEXTS)
        results[name] = {"ids": tokens.ids.tolist(), "mask": tokens.mask.astype(int).tolist()}
    return results
