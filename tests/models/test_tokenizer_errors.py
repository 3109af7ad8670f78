"""A tokenizer whose regular expressions fail raises kvchat's own error, and still encodes the next text."""

import json
import shutil

import pytest
from tokenizers import Regex, decoders
from transformers import AutoTokenizer

from kvchat.engine.detokenizer import Detokenizer
from kvchat.engine.session import load
from kvchat.errors import ModelError
from kvchat.models.tokenizer import guarded
from kvchat.paths import bundled_model_dir
from kvchat.protocol.messages import Sampling, Turn

ENDLESS, TEXT = "(a|a)+$", "a" * 22 + "b"  # 2**22 ways to match the letters
SPLIT = {"type": "Split", "pattern": {"Regex": ENDLESS}, "behavior": "Isolated", "invert": False}


@pytest.fixture
def folder(tmp_path):
    path = shutil.copytree(bundled_model_dir(), tmp_path / "model")
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [SPLIT, content["pre_tokenizer"]]}
    file.write_text(json.dumps(content))
    return path


def test_a_tokenizer_panic_is_an_error_and_the_session_continues(folder):
    session = load(folder, device="cpu")
    sampling = Sampling(max_new_tokens=2)
    with pytest.raises(ModelError, match="tokenizer") as caught:
        list(session.answer([Turn("user", TEXT)], sampling))
    assert caught.value.hint
    assert list(session.answer([Turn("user", "Hello")], sampling))
    session.close()


def test_a_panic_while_decoding_is_an_error():
    tokenizer = guarded(AutoTokenizer.from_pretrained(bundled_model_dir()))
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex(ENDLESS), "b")])
    with pytest.raises(ModelError, match="tokenizer"):
        tokenizer.decode(ids)
    detokenizer = Detokenizer(tokenizer)
    with pytest.raises(ModelError, match="tokenizer"):
        list(map(detokenizer.step, ids))


def test_a_guarded_tokenizer_otherwise_behaves_the_same():
    plain, tokenizer = (AutoTokenizer.from_pretrained(bundled_model_dir()) for _ in range(2))
    guarded(tokenizer)
    assert type(tokenizer).__name__ == type(plain).__name__
    ids = tokenizer("One, two.").input_ids
    assert ids == plain("One, two.").input_ids == tokenizer.encode("One, two.")
    assert tokenizer.decode(ids) == plain.decode(ids)
    with pytest.raises(KeyboardInterrupt):
        tokenizer(type("Interrupting", (), {"__class__": property(interrupt)})())


def interrupt(_):
    raise KeyboardInterrupt
