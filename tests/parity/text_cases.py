"""What parity of text encoders and tokenizers with transformers is checked on, made from seeds; no torch here."""

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from jaxdit.weights import read_config
from jaxdit.weights._tables import table_for

__all__ = [
    "TEXTS",
    "TEXT_CASES",
    "TOKENIZERS",
    "Captions",
    "TextCase",
    "captions_of",
    "draw",
    "write_encoder",
]


@dataclass(frozen=True, slots=True)
class TextCase:
    """A text encoder and the lengths of the captions it is run on.

    Attributes:
        name: of the case.
        kind: "t5" or "clip".
        config: settings of transformers' config.
        lengths: tokens of each caption, the end token last; all are padded to `padded`.
        padded: tokens of each row of the batch.
        recorded: whether the reference's results are stored for the tests that run without torch.
    """

    name: str
    kind: str
    config: dict[str, Any] = field(hash=False)
    lengths: tuple[int, ...]
    padded: int
    recorded: bool = False


_T5_SMALL = {
    "vocab_size": 40,
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 36,
    "num_layers": 3,
    "num_heads": 2,
    "feed_forward_proj": "gated-gelu",
}
_T5 = {
    **_T5_SMALL,
    "vocab_size": 1000,
    "d_model": 256,
    "d_kv": 64,
    "d_ff": 640,
    "num_layers": 6,
    "num_heads": 6,
}
_CLIP_SMALL = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 24,
    "eos_token_id": 2,
}
_CLIP = {
    **_CLIP_SMALL,
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 77,
}
TEXT_CASES = (
    TextCase("t5_small", "t5", _T5_SMALL, (1, 7, 40, 150), 150, recorded=True),
    TextCase("t5_relu", "t5", {**_T5_SMALL, "feed_forward_proj": "relu"}, (3, 40), 40, recorded=True),
    TextCase(
        "t5_buckets",
        "t5",
        {**_T5_SMALL, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
        (30,),
        30,
    ),
    TextCase("t5", "t5", _T5, (1, 77, 300, 512), 512),
    TextCase("clip_small", "clip", _CLIP_SMALL, (2, 7, 24), 24, recorded=True),
    TextCase(
        "clip_gelu", "clip", {**_CLIP_SMALL, "hidden_act": "gelu", "eos_token_id": 38}, (2, 5, 20), 20, True
    ),
    TextCase("clip", "clip", _CLIP, (2, 20, 77), 77),
)


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor's random values, float32, which depend on its name and shape alone.

    Scales of norms are around 1. T5 does not scale scores; its queries are small instead, as T5 initialises them.
    """
    name = name.removeprefix("text_model.")  # transformers 5 has no prefix
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) == 1:
        return (1.0 * name.endswith(".weight") + 0.2 * values).astype(np.float32)
    size = 0.7 / np.sqrt(shape[1]) * (0.25 if ".SelfAttention.q." in name else 1)
    return (size * values).astype(np.float32)


class Captions(NamedTuple):
    """A batch of random tokens, and which of them are no padding."""

    ids: np.ndarray
    mask: np.ndarray


def captions_of(case: TextCase) -> Captions:
    """Random captions; CLIP's begin with a token of their own, end with the highest one and are padded with it."""
    config = case.config
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    ids = rng.integers(3, config["vocab_size"] - 2, (len(case.lengths), case.padded)).astype(np.int32)
    mask = np.arange(case.padded) < np.array(case.lengths)[:, None]
    end = 1
    if case.kind == "clip":
        end = config["eos_token_id"] if config["eos_token_id"] != 2 else config["vocab_size"] - 1
        ids[:, 0] = config["vocab_size"] - 2 if end != config["vocab_size"] - 2 else config["vocab_size"] - 1
    ids[np.arange(len(ids)), np.array(case.lengths) - 1] = end
    ids[~mask] = 0 if case.kind == "t5" else end
    return Captions(ids, mask)


def write_encoder(case: TextCase, folder: Path) -> None:
    """A folder as transformers 4 writes it, made without transformers."""
    kind = {"t5": "T5EncoderModel", "clip": "CLIPTextModel"}[case.kind]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [kind], **case.config}))
    shapes = table_for(read_config(folder), "transformers").shapes
    save_file({name: draw(name, shape) for name, shape in shapes.items()}, folder / "model.safetensors")


# Folders below tests/data/parity/tokenizers, and the length that captions are padded or cut to.
TOKENIZERS = {"t5": 24, "clip": 16}
TEXTS = (
    "",
    "a photo of a cat",
    "A PHOTO of   two Cats,\n sitting on 17 mats!",
    "  café naïve ÉCLAIR — “quoted” ½ 日本語 🙂 ",
    "don't we'll they're it's",
    "zzz qqq xyzzy 1234567890 #$%",
    "a cat <|endoftext|> and </s> a <pad> dog",
    "a red ball in the snow beside an old wooden house with a blue door under a grey sky in the early morning light",
)
