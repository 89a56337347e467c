"""Captions to tokens of the published text encoders, by files on disk; nothing is ever fetched."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from ._clip_text import HIGHEST_ID
from ._text_config import ClipTextConfig, T5Config

__all__ = ["Tokenizer", "TokenizerError", "Tokens"]

_ON_LONG = ("error", "truncate")
_CLIP_START, _CLIP_END = "<|startoftext|>", "<|endoftext|>"
_CLIP_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


class TokenizerError(ValueError):
    """Files that are no tokenizer, one of another encoder, or a caption that is too long."""


class Tokens(NamedTuple):
    """Captions as an encoder takes them.

    Attributes:
        ids: int32 tokens, filled up with the padding token.
        mask: True for the tokens of the caption, its start and end among them. FLUX.1's pipeline uses none.
    """

    ids: Int[np.ndarray, "b l"]
    mask: Bool[np.ndarray, "b l"]


class Tokenizer:
    """The tokenizer in a folder, such as `tokenizer` (CLIP) or `tokenizer_2` (T5) of FLUX.1's pipeline.

    Reads tokenizer.json, or CLIP's vocab.json and merges.txt. The padding token is the one that tokenizer_config.json
    or special_tokens_map.json names, else the one that tokenizer.json pads with; else it is "<pad>" for tokenizer.json,
    and the end token for vocab.json and merges.txt.

    Args:
        path: the folder, or its tokenizer.json.
        max_length: tokens of every caption, padding included: FLUX.1 takes 77 for CLIP, and for T5 512 (dev) or
            256 (schnell).
        on_long: what becomes of a caption of more tokens: "error", or "truncate" to keep its first ones and the end.

    Raises:
        TokenizerError: for files that are missing or no tokenizer, that name no padding token, or add no end token.
        ValueError: for another `on_long`, or a max_length in which no caption fits.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_length: int, on_long: str = "error") -> None:
        if on_long not in _ON_LONG:
            raise ValueError(
                f"Tokenizer: on_long must be one of {', '.join(_ON_LONG)}; got on_long={on_long!r}. "
                "diffusers truncates."
            )
        self.path, self.max_length, self.on_long = Path(path), max_length, on_long
        folder = self.path if self.path.is_dir() else self.path.parent
        self._backend, default_pad = _backend(self.path)
        padding = self._backend.padding or {}
        # What the file says of lengths is replaced by what is asked for here.
        self._backend.no_padding()
        self._backend.no_truncation()
        frame = self._backend.encode("").ids
        if not frame:
            raise TokenizerError(
                f"{self.path} adds no end token to a caption, which encoders need. Take the encoder's own tokenizer."
            )
        if max_length <= len(frame):
            raise ValueError(
                f"Tokenizer: max_length must leave room beside {len(frame)} special tokens; got "
                f"max_length={max_length}. FLUX.1 has 77 for CLIP and 512 for T5."
            )
        self.eos_id: int = frame[-1]
        self.pad_id: int = self._id(_named_pad(folder) or padding.get("pad_token") or default_pad)
        if on_long == "truncate":
            self._backend.enable_truncation(max_length)

    def _id(self, token: str) -> int:
        found = self._backend.token_to_id(token)
        if found is None:
            raise TokenizerError(
                f"{self.path}: the padding token {token!r} is not in the vocabulary. Name the encoder's in "
                "tokenizer_config.json, as pad_token."
            )
        return found

    @property
    def highest_id(self) -> int:
        """The highest id of the vocabulary, special tokens included."""
        return max(self._backend.get_vocab(with_added_tokens=True).values())

    def __call__(self, captions: Sequence[str]) -> Tokens:
        """Tokens of captions, on the host.

        Args:
            captions: any texts, the empty one among them.

        Returns:
            (captions, max_length) ids and mask.

        Raises:
            TypeError: for anything but a list of texts.
            TokenizerError: for a caption of more than `max_length` tokens, unless they are truncated.
        """
        if isinstance(captions, str) or not all(isinstance(text, str) for text in captions):
            raise TypeError(
                "Tokenizer: captions must be a list of texts; got something else. Put one in a list."
            )
        found = [encoding.ids for encoding in self._backend.encode_batch(list(captions))]
        long = next((i for i, ids in enumerate(found) if len(ids) > self.max_length), None)
        if long is not None:
            raise TokenizerError(
                f"Tokenizer: a caption must have at most max_length={self.max_length} tokens; caption {long} has "
                f"{len(found[long])}. Shorten it, or take on_long='truncate', as diffusers does."
            )
        ids = np.full((len(found), self.max_length), self.pad_id, np.int32)
        mask = np.zeros(ids.shape, np.bool_)
        for row, tokens in enumerate(found):
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = True
        return Tokens(ids, mask)

    def check(self, config: T5Config | ClipTextConfig) -> None:
        """Refuse an encoder that this is no tokenizer of.

        Raises:
            TokenizerError: if the encoder has fewer rows than there are ids, fewer positions than max_length, or other
                ids for the special tokens it knows.
        """
        wrong = []
        if self.highest_id >= config.vocab_size:
            wrong.append(
                f"its highest id is {self.highest_id}, the encoder has vocab_size={config.vocab_size}"
            )
        end = config.eos_id
        if isinstance(config, ClipTextConfig):
            if self.max_length > config.max_length:
                wrong.append(f"max_length={self.max_length}, the encoder has max_length={config.max_length}")
            end = self.highest_id if end == HIGHEST_ID else end
        elif self.pad_id != config.pad_id:
            wrong.append(f"its padding token is {self.pad_id}, the encoder's pad_id={config.pad_id}")
        if self.eos_id != end:
            wrong.append(f"its end token is {self.eos_id}, the encoder's {end}")
        if wrong:
            raise TokenizerError(
                f"{self.path} is not the tokenizer of this {type(config).__name__}: {'; '.join(wrong)}. "
                "Take both from the same pipeline: tokenizer with text_encoder, tokenizer_2 with text_encoder_2."
            )


def _backend(path: Path) -> tuple[Backend, str]:
    """The tokenizer of a folder or file, and its padding token if nothing names one."""
    file = path / "tokenizer.json" if path.is_dir() else path
    vocab, merges = path / "vocab.json", path / "merges.txt"
    if not file.is_file() and not (vocab.is_file() and merges.is_file()):
        raise TokenizerError(
            f"{path} has neither tokenizer.json nor vocab.json with merges.txt. Of spiece.model transformers makes the "
            "first: T5TokenizerFast.from_pretrained(FOLDER).save_pretrained(FOLDER)."
        )
    try:
        if file.is_file():
            return Backend.from_file(str(file)), "<pad>"
        pairs = models.BPE.from_file(
            str(vocab), str(merges), end_of_word_suffix="</w>", fuse_unk=False, unk_token=_CLIP_END
        )
    except Exception as error:  # the library raises no narrower class
        raise TokenizerError(
            f"{path} cannot be read as a tokenizer ({error}). Fetch or save it again."
        ) from error
    return _clip(path, pairs), _CLIP_END


def _clip(path: Path, pairs: models.BPE) -> Backend:
    """CLIP's tokenizer: byte pairs inside lower-case words, whose last piece ends in </w>."""
    made = Backend(pairs)
    made.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    words = pre_tokenizers.Split(Regex(_CLIP_WORDS), behavior="removed", invert=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    start, end = made.token_to_id(_CLIP_START), made.token_to_id(_CLIP_END)
    if start is None or end is None:
        raise TokenizerError(f"{path}: the vocabulary must hold {_CLIP_START} and {_CLIP_END}. Take CLIP's.")
    made.add_special_tokens([_CLIP_START, _CLIP_END])
    made.post_processor = processors.RobertaProcessing(
        (_CLIP_END, end), (_CLIP_START, start), trim_offsets=False, add_prefix_space=False
    )
    return made


def _named_pad(folder: Path) -> str | None:
    """The padding token that a tokenizer's settings name."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            values: Any = json.loads(file.read_text(encoding="utf-8"))
            token = values.get("pad_token")
            token = token.get("content") if isinstance(token, dict) else token
            if not isinstance(token, str | None):
                raise ValueError(f"pad_token is a {type(token).__name__}")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise TokenizerError(f"{file} cannot be read ({error}). Fetch or save it again.") from error
        if token is not None:
            return token
    return None
