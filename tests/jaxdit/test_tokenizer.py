"""Tokenizers of T5 and CLIP from files: transformers' recorded tokens, lengths, padding tokens, wrong files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxdit.encoders import CLIP_L, T5_XXL, Tokenizer, TokenizerError
from tests.parity.text_cases import TEXTS, TOKENIZERS
from tests.parity.text_ours import run_our_tokenizers

RECORDED = Path(__file__).parents[1] / "data" / "parity" / "tokenizers"
T5, CLIP = RECORDED / "t5", RECORDED / "clip"
NUM_T5 = len(json.loads((T5 / "tokenizer.json").read_text())["model"]["vocab"])
NUM_CLIP = len(json.loads((CLIP / "vocab.json").read_text()))
END = NUM_CLIP - 1
T5_CONFIG = replace(T5_XXL, vocab_size=NUM_T5)
CLIP_CONFIG = replace(CLIP_L, vocab_size=NUM_CLIP)


@pytest.fixture
def copied(tmp_path):
    """Copies a recorded folder, with changes to its settings."""

    def copy(folder, **settings):
        target = tmp_path / folder.name
        shutil.copytree(folder, target)
        file = target / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
        return target

    return copy


def test_recorded_tokens_of_transformers():
    assert run_our_tokenizers(RECORDED) == json.loads((RECORDED / "tokens.json").read_text())


@pytest.mark.parametrize("name", TOKENIZERS)
def test_captions_are_padded_and_too_long_ones_refused_or_cut(name):
    longest = Tokenizer(RECORDED / name, max_length=200)(TEXTS).mask.sum(axis=1).max()
    found = Tokenizer(RECORDED / name, max_length=int(longest))(TEXTS)
    assert found.ids.dtype == np.int32
    assert found.ids.shape == found.mask.shape == (len(TEXTS), longest)
    with pytest.raises(
        TokenizerError,
        match=rf"at most max_length={longest - 1} tokens; caption 7 has {longest}\. .*truncate",
    ):
        Tokenizer(RECORDED / name, max_length=int(longest) - 1)(TEXTS)
    cut = Tokenizer(RECORDED / name, max_length=int(longest) - 1, on_long="truncate")
    rows = cut(TEXTS)
    np.testing.assert_array_equal(rows.ids[:7], found.ids[:7, :-1])
    np.testing.assert_array_equal(rows.ids[7, :-1], found.ids[7, :-2])
    assert rows.ids[7, -1] == found.ids[7, -1] == cut.eos_id


def test_padding_is_what_is_not_of_the_caption_even_where_it_looks_like_its_end():
    found = Tokenizer(CLIP, max_length=8)([""])
    assert found.ids.tolist() == [[END - 1] + 7 * [END]]
    assert found.mask.tolist() == [[True] * 2 + [False] * 6]
    assert Tokenizer(CLIP, max_length=8)([]).ids.shape == (0, 8)


def test_lengths_in_the_file_are_replaced(copied):
    folder = copied(T5)
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    values["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    values["padding"] = {
        "strategy": {"Fixed": 5},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    file.write_text(json.dumps(values))
    for a, b in zip(
        Tokenizer(folder, max_length=200)(TEXTS), Tokenizer(T5, max_length=200)(TEXTS), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_the_padding_token_that_is_named(copied):
    folder = copied(CLIP, pad_token={"content": "!", "special": True})
    made = Tokenizer(folder, max_length=8)
    assert made.pad_id == made([""]).ids[0, -1] == 0
    (folder / "tokenizer_config.json").unlink()
    assert Tokenizer(folder, max_length=8).pad_id == END
    (folder / "special_tokens_map.json").write_text('{"pad_token": "a"}')
    assert Tokenizer(folder, max_length=8).pad_id not in (0, END)


def test_a_file_alone(copied):
    file = copied(T5) / "tokenizer.json"
    (file.parent / "tokenizer_config.json").unlink()
    made = Tokenizer(file, max_length=24, on_long="truncate")
    assert (made.pad_id, made.eos_id) == (0, 1)
    np.testing.assert_array_equal(
        made(TEXTS).ids, Tokenizer(T5, max_length=24, on_long="truncate")(TEXTS).ids
    )


def test_encoders_that_it_is_of():
    t5, clip = Tokenizer(T5, max_length=512), Tokenizer(CLIP, max_length=77)
    assert (t5.highest_id, clip.highest_id) == (NUM_T5 - 1, END)
    t5.check(T5_CONFIG)
    clip.check(CLIP_CONFIG)
    clip.check(replace(CLIP_CONFIG, eos_id=END))


@pytest.mark.parametrize(
    ("folder", "length", "config", "message"),
    [
        (
            T5,
            512,
            replace(T5_CONFIG, vocab_size=NUM_T5 - 1),
            f"highest id is {NUM_T5 - 1}, .* vocab_size={NUM_T5 - 1}",
        ),
        (
            CLIP,
            77,
            replace(CLIP_CONFIG, vocab_size=END),
            f"highest id is {END}, the encoder has vocab_size={END}",
        ),
        (CLIP, 78, CLIP_CONFIG, "max_length=78, the encoder has max_length=77"),
        (CLIP, 77, replace(CLIP_CONFIG, eos_id=7), f"its end token is {END}, the encoder's 7"),
        (T5, 512, replace(T5_CONFIG, eos_id=2), "its end token is 1, the encoder's 2"),
        (T5, 512, replace(T5_CONFIG, pad_id=3), "its padding token is 0, the encoder's pad_id=3"),
        (CLIP, 77, T5_XXL, f"padding token is {END}.*; its end token is {END}, the encoder's 1"),
        (T5, 77, CLIP_L, f"its end token is 1, the encoder's {NUM_T5 - 1}"),
    ],
)
def test_encoders_that_it_is_not_of(folder, length, config, message):
    made = Tokenizer(folder, max_length=length)
    with pytest.raises(TokenizerError, match=f"is not the tokenizer of this .*{message}"):
        made.check(config)


def test_options_and_captions_that_are_refused():
    with pytest.raises(ValueError, match="on_long must be one of error, truncate; got on_long='warn'"):
        Tokenizer(T5, max_length=8, on_long="warn")
    with pytest.raises(ValueError, match="leave room beside 2 special tokens; got max_length=2"):
        Tokenizer(CLIP, max_length=2)
    assert Tokenizer(CLIP, max_length=3, on_long="truncate")(["a cat"]).ids.shape == (1, 3)
    with pytest.raises(TypeError, match="captions must be a list of texts"):
        Tokenizer.__call__.__wrapped__(Tokenizer(T5, max_length=8), "a cat")


def test_folders_that_are_no_tokenizer(tmp_path, copied):
    with pytest.raises(TokenizerError, match=r"has neither tokenizer.json nor vocab.json with merges.txt"):
        Tokenizer(tmp_path, max_length=8)
    with pytest.raises(TokenizerError, match=r"nowhere has neither"):
        Tokenizer(tmp_path / "nowhere", max_length=8)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"cannot be read as a tokenizer"):
        Tokenizer(tmp_path, max_length=8)
    folder = copied(CLIP)
    vocab = json.loads((folder / "vocab.json").read_text())
    vocab.pop("<|startoftext|>")
    (folder / "vocab.json").write_text(json.dumps(vocab))
    with pytest.raises(
        TokenizerError, match=r"the vocabulary must hold <\|startoftext\|> and <\|endoftext\|>"
    ):
        Tokenizer(folder, max_length=8)
    (folder / "merges.txt").unlink()
    with pytest.raises(TokenizerError, match=r"has neither"):
        Tokenizer(folder, max_length=8)


@pytest.mark.parametrize("text", ["", "[]", '{"pad_token": 3}', '{"pad_token": {"content": 3}}'])
def test_settings_that_cannot_be_read(copied, text):
    folder = copied(T5)
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json cannot be read"):
        Tokenizer(folder, max_length=8)


def test_padding_tokens_that_are_not_there(copied):
    folder = copied(T5, pad_token="<nothing>")
    with pytest.raises(TokenizerError, match="the padding token '<nothing>' is not in the vocabulary"):
        Tokenizer(folder, max_length=8)


def test_a_tokenizer_that_ends_no_caption(copied):
    file = copied(T5) / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": None}))
    with pytest.raises(TokenizerError, match="adds no end token to a caption"):
        Tokenizer(file, max_length=8)
