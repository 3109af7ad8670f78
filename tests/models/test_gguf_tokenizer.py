"""The tokenizer of a GGUF file gives llama.cpp's ids, and every token that the file marks is one id."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from support.real_models import FILES

from kvchat.errors import ModelError
from kvchat.models import tokenizer as tokenizer_module
from kvchat.models.gguf_file import GgufFile, Tensor, read

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"]
TEXTS = Path(__file__).parents[1] / "support" / "tokenizer_texts.txt"


def file_of(tokens, types, pre="smollm", kind="gpt2", rows=None, **values):
    """A file's header with this vocabulary."""
    given = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tuple(token.encode() for token in tokens),
        "tokenizer.ggml.token_type": tuple(types),
        "tokenizer.ggml.merges": (),
        **{f"tokenizer.ggml.{key}": value for key, value in values.items()},
    }
    path = Path("x.gguf")
    table = Tensor("token_embd.weight", 0, (rows or len(tokens), 4), path, 0, 0)
    return GgufFile(path, given, (table,), (path,))


def bytes_and(*others):
    """The tokens of all bytes, with ``others`` behind them, and their types."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    return [*letters, *(token for token, _ in others)], [NORMAL] * 256 + [kind for _, kind in others]


def build(*given, **values):
    return tokenizer_module.build(file_of(*given, **values), "m")


def test_control_tokens_and_those_users_defined_are_one_id_each_in_any_spelling():
    others = [*((token, CONTROL) for token in DEEPSEEK), ("<think>", USER_DEFINED), ("    ", USER_DEFINED)]
    built = build(*bytes_and(*others), eos_token_id=259, bos_token_id=256)
    text = "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜><think>    b<｜end▁of▁sentence｜>"
    ids = built.tokenizer.encode(text, add_special_tokens=False)
    assert [id for id in ids if id >= 256] == [256, 257, 258, 260, 261, 259]
    assert len(ids) == 8
    assert built.tokenizer.decode(ids, skip_special_tokens=True) == "a<think>    b"
    assert (built.tokenizer.eos_token_id, built.tokenizer.bos_token, built.notes) == (259, DEEPSEEK[0], ())


def test_more_tokens_than_embeddings_are_refused_with_the_numbers():
    with pytest.raises(ModelError, match=r"256 tokens.* 255"):
        build(*bytes_and(), rows=255)


@pytest.mark.parametrize(("pre", "named"), [("of-next-year", '"of-next-year"'), ("", "no pre-tokenizer")])
def test_a_pre_tokenizer_that_nobody_knows_is_told(pre, named):
    (note,) = build(*bytes_and(), pre=pre).notes
    assert named in note


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["a", "  ", "1", "2", " b"]),
        ("gpt-2", ["a", " ", " 12", " b"]),
        ("llama-bpe", ["a", " ", " ", "12", " b"]),
        ("qwen2", ["a", " ", " ", "1", "2", " b"]),
        ("deepseek-v3", ["a", "  ", "12", " b"]),
    ],
)
def test_texts_are_split_as_llama_cpp_splits_them(pre, pieces):
    built = build(*bytes_and(), pre=pre).tokenizer.backend_tokenizer
    split = [text for text, _ in built.pre_tokenizer.pre_tokenize_str("a  12 b")]
    assert [piece.replace("Ġ", " ") for piece in split] == pieces


def test_every_regular_expression_compiles():
    for pre in tokenizer_module.PRE_TOKENIZERS:
        assert not build(*bytes_and(), pre=pre).notes


@pytest.mark.parametrize("kind", ["bert", "rwkv", "none", ""])
def test_other_kinds_are_refused(kind):
    with pytest.raises(ModelError, match="tokenizer is"):
        build(*bytes_and(), kind=kind)


@pytest.mark.parametrize(("prefix", "ids"), [(True, [5, 4]), (False, [3, 4])])
def test_pieces_of_sentences_merge_in_the_order_of_their_scores(prefix, ids):
    tokens = ["<unk>", "<s>", "</s>", "a", "▁b", "▁a", "▁", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * 5, *[BYTE] * 256]
    scores = (0.0, 0.0, 0.0, -3.0, -1.0, -2.0, -4.0, -5.0, *[0.0] * 256)
    built = build(tokens, types, pre="default", kind="llama", scores=scores, add_space_prefix=prefix).tokenizer
    assert built.encode("a b", add_special_tokens=False) == ids
    assert built("a b")["input_ids"] == [1, *ids], "it begins with bos unless the file says otherwise"
    assert built.decode(ids) == "a b"
    assert built.encode("é", add_special_tokens=False)[-2:] == [8 + 0xC3, 8 + 0xA9]


def test_the_end_of_a_turn_is_an_end_too():
    built = build(*bytes_and(("<eos>", CONTROL), ("<end>", NORMAL)), eos_token_id=256, eot_token_id=257)
    assert built.tokenizer.encode("<end>", add_special_tokens=False) == [257]


def test_a_tokenizer_that_loses_texts_is_told():
    (note,) = tokenizer_module.check(build(["a", "b"], [NORMAL, NORMAL]).tokenizer, 2, "m")
    assert "Thai" in note
    assert not tokenizer_module.check(build(*bytes_and()).tokenizer, 256, "m")


@pytest.mark.slow("llama.cpp is started")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("smollm2", marks=pytest.mark.real_model("smollm2")),
        pytest.param("gemma3-270m", marks=pytest.mark.real_model("gemma3-270m")),
    ],
)
def test_ids_are_those_of_llama_cpp(name):
    xllamacpp = pytest.importorskip("xllamacpp")
    path = FILES[name]
    asked = xllamacpp.CommonParams()
    asked.model.path, asked.n_ctx, asked.warmup, asked.verbosity = str(path), 256, False, -1
    server = xllamacpp.Server(asked)
    tokenizer = tokenizer_module.build(read(path), name).tokenizer
    unlike = []
    for text in TEXTS.read_bytes().decode().split("\n---\n"):
        body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", body)
        theirs = json.loads(urllib.request.urlopen(request).read())["tokens"]
        if tokenizer.encode(text, add_special_tokens=False) != theirs:
            unlike.append(text)
    assert unlike == []
