"""The reference for text encoders and tokenizers: transformers. Needs the parity environment (`make parity`)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizerFast,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from tests.parity.text_cases import TEXTS, TOKENIZERS, TextCase, captions_of, draw

__all__ = ["run_text_reference", "run_tokenizer_reference", "text_reference_model", "train_tokenizers"]

_CLASSES = {"t5": (T5EncoderModel, T5Config), "clip": (CLIPTextModel, CLIPTextConfig)}


def text_reference_model(case: TextCase) -> Any:
    """Transformers' model of a case, with its weights, in evaluation mode."""
    kind, config = _CLASSES[case.kind]
    model = kind(config(**case.config, attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(torch.from_numpy(draw(name, tuple(value.shape))))
    return model


def run_text_reference(case: TextCase, dtype: torch.dtype = torch.float32) -> dict[str, np.ndarray]:
    """`unmasked.features` and `masked.features`, of CLIP also `.pooled`; float32."""
    model, captions = text_reference_model(case).to(dtype), captions_of(case)
    results = {}
    for name, mask in (("unmasked", None), ("masked", torch.from_numpy(captions.mask).long())):
        with torch.no_grad():
            out = model(input_ids=torch.from_numpy(captions.ids).long(), attention_mask=mask)
        results[f"{name}.features"] = out.last_hidden_state.float().numpy()
        if case.kind == "clip":
            results[f"{name}.pooled"] = out.pooler_output.float().numpy()
    return results


def train_tokenizers(root: Path) -> None:
    """Small tokenizers in the layouts that T5's and CLIP's are published in: `t5` and `clip` below `root`."""
    for name in TOKENIZERS:
        (root / name).mkdir(parents=True, exist_ok=True)
    _train_t5(root / "t5")
    _train_clip(root / "clip")


def _train_t5(folder: Path) -> None:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    made.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    made.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _train_clip(folder: Path) -> None:
    start, end = "<|startoftext|>", "<|endoftext|>"
    made = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token=end))
    made.normalizer = CLIPTokenizerFast().backend_tokenizer.normalizer
    made.pre_tokenizer = CLIPTokenizerFast().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=620,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    learned = json.loads(made.to_str())["model"]
    # As published: bytes, bytes that end words, what was merged; the special tokens last.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [" ".join(pair) for pair in learned["merges"]]
    tokens = [*alphabet, *(c + "</w>" for c in alphabet), *(merge.replace(" ", "") for merge in merges)]
    tokens = [*dict.fromkeys(tokens), start, end]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}) + "\n")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    names = {"bos_token": start, "eos_token": end, "unk_token": end, "pad_token": end}
    settings = {"tokenizer_class": "CLIPTokenizer", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def run_tokenizer_reference(root: Path) -> dict[str, Any]:
    """Ids and masks of all texts, padded or cut to a tokenizer's length as FLUX.1's pipeline does, as lists."""
    results = {}
    for name, kind in (("t5", T5TokenizerFast), ("clip", CLIPTokenizerFast)):
        tokenizer = kind.from_pretrained(root / name)
        found = tokenizer(
            list(TEXTS),
            padding="max_length",
            max_length=TOKENIZERS[name],
            truncation=True,
            return_tensors="np",
        )
        results[name] = {"ids": found["input_ids"].tolist(), "mask": found["attention_mask"].tolist()}
    return results
