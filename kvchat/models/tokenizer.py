"""Build tokenizers from a GGUF file's keys, as llama.cpp does, and check tokenizers before they are used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from kvchat.errors import ModelError
from kvchat.models.gguf_file import EMBEDDINGS, ENDS, GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # llama.cpp's types of tokens
SPM, BYTE_LEVEL, GEMMA4 = "llama", "gpt2", "gemma4"  # llama.cpp's names of the kinds of tokenizers
SPACE = "▁"
MAX_MERGED = 512  # longest token whose merges are computed: the time grows with the square of the length
KEY = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Defaults for a vocabulary of kind "llama".
SPM_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")  # control tokens of Phi-3 that do not swallow the following spaces
# ---- pre-tokenizers
# Regular expressions that split a text, one after another, before merges are applied. The text between two matches is a
# piece too.
_CONTRACTIONS = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_ENDINGS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_MARK = r"[^\r\n\p{L}\p{N}]?"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_MAYBE = rf"(?:{_CONTRACTIONS})?"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_ENDINGS}"
)
# Uppercase, lowercase and other letters of scripts that have both cases.
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ\u1F5F-\u1F7Dᾀ-ᾴᾶ-ᾼ\u1FBEῂ-ῄῆ-ῌ\u1FD0-\u1FD3\u1FD6-\u1FDBῠ-Ῥῲ-ῴ"
    r"ῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212A-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DEEPSEEK_CJK = "[一-龥ࠀ-一가-퟿]+"
_WORDS_OF_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
GPT2 = (_GPT2,)
DIGITS = (r"\p{N}", _GPT2)
_OF_LLAMA3 = "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"
WHOLE_PIECES = {*_OF_LLAMA3, "tekken", "minicpm5"}  # a piece that is a token is not built from merges
# By default a text begins with "bos".
BEGIN = {*_OF_LLAMA3, "tekken", "chameleon"}


def _words(numbers: str, letters: str = r"\p{L}", marks: str = _MARKS) -> str:
    """Return a pattern for contractions, words after at most one mark, ``numbers``, marks, and spaces."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{numbers}|{marks}|{_ENDINGS}"


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum"),
            *("modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe", "mpt", "olmo", "jais", "trillion"),
            *("granite-docling", "exaone4"),
        ),
        GPT2,
    ),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), DIGITS),
    **dict.fromkeys(
        (*_OF_LLAMA3, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
        (_LLAMA3,),
    ),
    **dict.fromkeys(
        (
            *("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open"),
            *("grok-2", "bailingmoe", "bailingmoe2", "llada-moe"),
        ),
        (_QWEN2,),
    ),
    "qwen35": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_ENDINGS}",
    ),
    "minicpm5": (r"\p{N}{1,3}", _words(r"\p{N}+")),
    "seed-coder": (_words(r"\p{N}", marks=r" ?[^\s\p{L}\p{N}\r\n]+"),),
    "tekken": (rf"{_MARK}{_UPPER}*{_LOWER}+|{_MARK}{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHED}|{_ENDINGS}",),
    **dict.fromkeys(
        ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
        (
            rf"{_MARK}{_UPPER}*{_LOWER}+{_MAYBE}|{_MARK}{_UPPER}+{_LOWER}*{_MAYBE}"
            rf"|\p{{N}}{{1,3}}|{_SLASHED}|{_ENDINGS}",
        ),
    ),
    "deepseek-llm": (
        r"[\r\n]",
        _DEEPSEEK_LETTERS,
        r"\s?[!-/:-~！-／：-～‘-‟、。]+",
        r"\s+\z",
        _DEEPSEEK_CJK,
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_WORDS_OF_BLOOM,)),
    "viking": (_WORDS_OF_BLOOM, r"\p{N}"),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "chameleon": (
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
    ),
}


class GgufTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A tokenizer for transformers, whose own constructor would take seconds to copy a large vocabulary."""

    def __init__(self, built: Tokenizer, **kwargs: Any) -> None:
        self._tokenizer = built
        super().__init__(clean_up_tokenization_spaces=False, **kwargs)


class Built(NamedTuple):
    """A tokenizer for transformers, and notes for the user."""

    tokenizer: Any
    notes: tuple[str, ...]


def build(file: GgufFile, name: str, template: str = "") -> Built:
    """Build the tokenizer of the model ``name``, with ``template`` in place of its own chat template.

    Raises:
        ModelError: the file has none, or its tokenizer is damaged or unknown.
    """
    vocabulary = _Vocabulary(file, name)
    built, notes = vocabulary.tokenizer()
    named = {key: vocabulary.tokens[id] for key, id in vocabulary.special.items()}
    template, start = template or _template(file), vocabulary.start
    if template and start and not ("bos_token" in template or start in template):
        template = "{{- bos_token }}" + template  # llama.cpp begins chats with it too; transformers would not
    wrapped = GgufTokenizer(built, chat_template=template or None, **named)
    return Built(wrapped, tuple(notes))


def _template(file: GgufFile) -> str:
    """Return the default chat template, or else the first of the named ones."""
    named = (file.text(f"{TEMPLATE}.{_decoded(name)}") for name in file.values.get(f"{TEMPLATE}s", ()))
    return file.text(TEMPLATE) or file.text(f"{TEMPLATE}.default") or next(filter(None, named), "")


class _Vocabulary:
    """The ``tokens`` of a file, their ``types``, and the ids of the special ones."""

    def __init__(self, file: GgufFile, name: str) -> None:
        self._file, self._name = file, name
        self.kind, self.pre = file.text(f"{KEY}model"), file.text(f"{KEY}pre")
        if self.kind not in (SPM, BYTE_LEVEL, GEMMA4):
            what = f'of the kind "{self.kind}"' if self.kind else "missing"
            raise self._refusal(f"Its tokenizer is {what}; kvchat knows {SPM}, {BYTE_LEVEL} and {GEMMA4}.")
        tokens = file.values.get(f"{KEY}tokens") or ()
        if not tokens or not isinstance(tokens[0], bytes):
            raise self._refusal("It has no vocabulary.")
        self.tokens = [_decoded(token) or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]
        self.types = list(file.values.get(f"{KEY}token_type") or [NORMAL] * len(tokens))
        if len(self.types) != len(self.tokens):
            raise self._refusal(f"It has {len(self.tokens):,} tokens but types for {len(self.types):,}.")
        self.special = {key: id for key, named in SPECIAL.items() if (id := self._id(named)) is not None}
        self.ends = dict.fromkeys(id for named in ENDS if (id := self._id(named)) is not None)
        rows = next((one.shape[0] for one in file.tensors if one.name == EMBEDDINGS), len(self.tokens))
        if len(self.tokens) > rows:
            raise self._refusal(f"It has {len(self.tokens):,} tokens and embeddings for {rows:,}.")

    def tokenizer(self) -> tuple[Tokenizer, list[str]]:
        """Build the tokenizer; also return notes for the user."""
        ids = {token: id for id, token in enumerate(self.tokens)}
        if self.kind == BYTE_LEVEL:
            built, notes = self._byte_level(ids)
        else:
            built, notes = self._sentencepiece(ids), []
        self._add_special(built)
        if start := self.start:
            special = [(start, self.special["bos_token"])]
            built.post_processor = processors.TemplateProcessing(single=f"{start} $A", special_tokens=special)
        return built, notes

    @property
    def start(self) -> str:
        """The token that begins every text; "" for none."""
        adds = "bos_token" in self.special and self._flag("add_bos_token", self.kind == SPM or self.pre in BEGIN)
        return self.tokens[self.special["bos_token"]] if adds else ""

    def _byte_level(self, ids: dict[str, int]) -> tuple[Tokenizer, list[str]]:
        """Build a tokenizer that merges bytes, each written as a printable character."""
        built = Tokenizer(BPE(ids, list(self._merges(ids)), ignore_merges=self.pre in WHOLE_PIECES))
        splits = PRE_TOKENIZERS.get(self.pre, _DEFAULT)
        built.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(split), "isolated") for split in splits),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        built.decoder = decoders.ByteLevel()
        if self.pre in PRE_TOKENIZERS:
            return built, []
        unknown = f'kvchat does not know its pre-tokenizer "{self.pre}"' if self.pre else "It names no pre-tokenizer"
        return built, [f"{unknown}: texts are split by llama.cpp's default, which may not be the model's own way."]

    def _sentencepiece(self, ids: dict[str, int]) -> Tokenizer:
        """Build a tokenizer that merges characters; characters that are not tokens are written as bytes."""
        merges = self._merges(ids) if self.kind == GEMMA4 else self._merges_by_score(ids)
        unknown = self.tokens[self.special["unk_token"]] if "unk_token" in self.special else None
        built = Tokenizer(BPE(ids, list(merges), byte_fallback=True, unk_token=unknown, fuse_unk=False))
        prefix = self.kind == SPM and self._flag("add_space_prefix", True)
        spaces = normalizers.Replace(" ", SPACE)
        built.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
        if self.kind == GEMMA4:
            built.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|[\n]+"), "isolated")
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        built.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
        return built

    def _merges(self, ids: dict[str, int]) -> Iterator[tuple[str, str]]:
        """Yield the merges that the file lists; the first space after the first character separates the parts."""
        for merge in map(_decoded, self._file.values.get(f"{KEY}merges") or ()):
            at = merge.find(" ", 1)
            left, right = merge[:at], merge[at + 1 :]
            if at > 0 and left in ids and right in ids and left + right in ids:
                yield left, right

    def _merges_by_score(self, ids: dict[str, int]) -> Iterable[tuple[str, str]]:
        """Return the pairs of tokens that make up a token, those with the highest score first."""
        scores = self._file.values.get(f"{KEY}scores") or ()
        if len(scores) != len(self.tokens):
            raise self._refusal(f"It has {len(self.tokens):,} tokens but scores for {len(scores):,}.")
        best_first = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        return [
            (left, right)
            for token in map(self.tokens.__getitem__, best_first)
            for at in range(1, len(token) if len(token) <= MAX_MERGED else 0)
            if (left := token[:at]) in ids and (right := token[at:]) in ids
        ]

    def _add_special(self, built: Tokenizer) -> None:
        """Make each token that the file marks as special a single id in any text."""
        always = {*self.special.values(), *self.ends}
        # No key says that Phi-3's tokens include the spaces and line ends after them.
        takes_spaces = self.kind == SPM and self._file.architecture == "phi3"
        control, defined = [], []
        for id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind in (CONTROL, UNKNOWN) or id in always:
                rstrip = takes_spaces and token not in PHI3_PLAIN
                control.append(AddedToken(token, normalized=False, special=True, rstrip=rstrip))
            elif kind == USER_DEFINED:
                defined.append(AddedToken(token, normalized=False, special=False))
        built.add_special_tokens(control)
        built.add_tokens(defined)
        for text in (added.content for added in (*control, *defined)):
            got = built.encode(text, add_special_tokens=False).ids
            if len(got) != 1 or self.tokens[got[0]] != text:
                raise self._refusal(f"Its token {text!r} is read as {len(got)} tokens.")

    def _id(self, named: str) -> int | None:
        default = SPM_SPECIAL.get(named) if self.kind == SPM else None
        id = self._file.number(f"{KEY}{named}")
        id = default if id is None else id
        return id if id is not None and id < len(self.tokens) else None

    def _flag(self, named: str, default: bool) -> bool:
        value = self._file.values.get(f"{KEY}{named}", default)
        return value if isinstance(value, bool) else default

    def _refusal(self, why: str) -> ModelError:
        return ModelError(f"{self._name} cannot be loaded.", why, "Choose another file of the model.")


def _decoded(text: bytes) -> str:
    return text.decode(errors="replace")


def check(tokenizer: Any, rows: int, name: str) -> list[str]:
    """Return a note if the ``tokenizer`` of the model ``name`` has more tokens than its embeddings have ``rows``.

    Raises:
        ModelError: a token that the chat template may write has no embedding.
    """
    notes = []
    if len(tokenizer) > rows:
        counts = f"Its tokenizer has {len(tokenizer):,} tokens, and the model has embeddings for {rows:,}"
        outside = [token.content for id, token in tokenizer.added_tokens_decoder.items() if id >= rows]
        template = str(tokenizer.chat_template or "")
        if any(token in template for token in outside):
            raise ModelError(
                f"{name} cannot be loaded.",
                f"{counts}; its chat template writes {next(token for token in outside if token in template)}.",
                "Download the model again, with its own tokenizer.",
            )
        notes.append(f"{counts}.")
    return notes
