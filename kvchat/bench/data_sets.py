"""LongBench, RULER and AIME: their questions, and each data set's own scores, compared between modes.

Of PG19 and WikiText, which are texts, the agreement with full is measured.
"""

from __future__ import annotations

import difflib
import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvchat.bench import agreement
from kvchat.bench.frame import Cell, Experiment, Frame, ModelChoice, Result, Row, mean, methods, parsed
from kvchat.bench.settings import Agreement, Data
from kvchat.bench.texts import ENDINGS, Line, files, lines
from kvchat.bench.walk import Walk
from kvchat.engine.prompt import PromptEncoder, Stored
from kvchat.engine.sampler import Sampler, read
from kvchat.errors import UsageError, did_you_mean
from kvchat.files import read_text
from kvchat.protocol.messages import Sampling, Turn

FULL = "full"
PROMPT, TEXT_TOKENS = 16, 1000  # of a text's passages
Score = Callable[[str], float]
PROMPTS = "dataset2prompt.json"
# Few-shot tasks and code go on with the text instead of answering a turn.
CONTINUED = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
# RULER's tasks by the beginning of their names: tokens of an answer.
RULER = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
AIME_TOKENS = 16_384
AIME_PROMPT = "{problem}\n\nReason step by step, and put the final answer within \\boxed{{}}."
Words = Sequence[str]
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
NOT_CODE = ("`", "#", "//")
HIGHEST = 999  # answer of an AIME problem


def run(settings: Data, choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Measure and return plain data, ready for JSON: a row for each row of the data set, sample and variant.

    ``summary`` has a row for each task and variant, and one for the mean of all tasks.

    Raises:
        UsageError: an unknown data set, or a bad row of it, before anything is measured; KvchatError: the model cannot
            be loaded, or all modes refuse.
    """
    if settings.name in ENDINGS:
        return _agreement(settings, choice, frame)
    frame, items = frame or Frame(), chosen(settings)
    variants = tuple(dict.fromkeys((FULL, *settings.modes)))
    found = methods(variants)
    model = choice.load(frame.report)
    experiment = Experiment.of(
        "data",
        f"{settings.name}: mean scores in percent",
        asdict(settings),
        found,
        model,
    )
    asker = _Asker(Walk(model), settings)
    cells = [{"task": item.task, "place": item.place, "variant": variant} for item in items for variant in variants]
    by_place = {item.place: item for item in items}
    return frame.measure(
        experiment,
        cells,
        lambda cell: asker.rows(by_place[cell["place"]], cell),
        _line,
        lambda rows: _summary(rows, variants),
    )


def _agreement(settings: Data, choice: ModelChoice, frame: Frame | None) -> Result:
    """For texts, only a short prompt is prefilled exactly, so the tokens a mode skips matter from the start."""
    found = tuple(map(str, files(Path(settings.folder), ENDINGS[settings.name])))
    asked = Agreement(settings.modes, PROMPT, settings.tokens or TEXT_TOKENS, settings.rows, found, joined=False)
    return agreement.run(asked, choice, frame)


def chosen(settings: Data) -> list[Item]:
    """The rows to measure, all read and checked.

    Raises:
        UsageError: an unknown data set, or a bad row.
    """
    if settings.name not in QUESTIONS:
        raise UsageError(
            f'There is no data set "{settings.name}".', did_you_mean(settings.name, (*QUESTIONS, *ENDINGS))
        )
    items = list(QUESTIONS[settings.name](Path(settings.folder)))
    by_task: dict[str, list[Item]] = {}
    for item in items:
        by_task.setdefault(item.task, []).append(item)
    return [item for of_task in by_task.values() for item in of_task[: settings.rows]]


@dataclass(frozen=True)
class _Asker:
    """Asks one model every item in every variant."""

    walk: Walk
    settings: Data

    def rows(self, item: Item, cell: Cell) -> list[Row]:
        tokens = min(self.settings.tokens or item.tokens, self.walk.model.context // 2)
        prompt, cut = self._prompt(item, self.walk.model.context - tokens)
        return [
            self._answered(item, cell, prompt, tokens, sample) | {"cut": cut} for sample in range(self.settings.samples)
        ]

    def _answered(self, item: Item, cell: Cell, prompt: Sequence[int], tokens: int, sample: int) -> Row:
        walk, model = self.walk, self.walk.model
        sampler = Sampler(self._sampling(sample), model.vocab, model.device)
        logits = walk.begin(prompt, parsed(cell["variant"]), tokens)
        ids, tokens_read = list[int](), list[float]()
        while len(ids) < tokens and (token := read(sampler(logits))) not in model.eos_ids:
            ids.append(token)
            logits = walk.step(token)
            tokens_read.append(walk.tokens_read())
        text = model.tokenizer.decode(ids, skip_special_tokens=True)
        return {
            "sample": sample,
            "score": item.score(text),
            "text": text,
            "prompt_tokens": len(prompt),
            "answer_tokens": len(ids),
            "read_tokens": mean(tokens_read),
        }

    def _sampling(self, sample: int) -> Sampling:
        if self.settings.samples == 1:
            return Sampling(temperature=0)
        return Sampling(temperature=0.6, top_p=0.95, seed=self.settings.seed + sample)

    def _prompt(self, item: Item, room: int) -> tuple[Sequence[int], int]:
        """The prompt's ids, and how many tokens were cut from its middle."""
        tokenizer = self.walk.model.tokenizer
        text, cut = item.prompt, 0
        while True:
            ids = self._encoded(item, text)
            if len(ids) <= room or not text:
                return ids, cut
            of_text = tokenizer.encode(text, add_special_tokens=False)
            kept = max(0, len(of_text) - (len(ids) - room) - 1)
            text = tokenizer.decode(of_text[: kept // 2]) + tokenizer.decode(
                of_text[len(of_text) - (kept - kept // 2) :]
            )
            cut += len(of_text) - kept

    def _encoded(self, item: Item, text: str) -> Sequence[int]:
        tokenizer = self.walk.model.tokenizer
        if item.chat:
            return PromptEncoder(tokenizer).encode((Turn("user", text),), Stored()).ids
        ids: Sequence[int] = tokenizer.encode(text)
        return ids


def _summary(rows: Sequence[Row], variants: Sequence[str]) -> list[Row]:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    by_task = [_of_task(rows, task, variant) for task in tasks for variant in variants]
    means = [_mean_of_tasks([row for row in by_task if row["variant"] == variant], variant) for variant in variants]
    return [*by_task, *means] if len(tasks) > 1 else by_task


def _of_task(rows: Sequence[Row], task: str, variant: str) -> Row:
    mine = [row for row in rows if (row["task"], row["variant"]) == (task, variant) and "refused" not in row]
    best: dict[str, float] = {}
    for row in mine:
        best[row["place"]] = max(best.get(row["place"], 0.0), row["score"])
    return {
        "task": task,
        "variant": variant,
        "score": mean(row["score"] for row in mine),
        "best_of_samples": mean(best.values()),
        "cases": len(best),
        "cut": sum(bool(row["cut"]) for row in mine),
        "read_tokens": mean(row["read_tokens"] or 0 for row in mine),
    }


def _mean_of_tasks(rows: Sequence[Row], variant: str) -> Row:
    """Every task counts the same."""
    scored = [row for row in rows if row["cases"]]
    names = ("score", "best_of_samples", "read_tokens")
    return {
        "task": "mean",
        "variant": variant,
        **{name: mean(row[name] for row in scored) for name in names},
        **{name: sum(row[name] for row in scored) for name in ("cases", "cut")},
    }


def _line(row: Row) -> str:
    return f"{row['task']:<20} {row['variant']:<40} {100 * row['score']:5.1f}  {row['text'][:60]!r}"


@dataclass(frozen=True)
class Item:
    """A row as a question: the prompt, a turn of its own where it is ``chat``, and its answer's length and score.

    ``place`` is its file in the data set's folder and its line.
    """

    task: str
    place: str
    prompt: str
    chat: bool
    tokens: int
    score: Score


@dataclass(frozen=True)
class Kind:
    """A kind of LongBench's tasks: score of an answer and a reference, and the prompt where the folder has none.

    Of a ``first_line`` task only the answer's first line counts; the score of one with ``classes`` is given them too.
    """

    score: Callable[..., float]
    prompt: str
    first_line: bool = False
    classes: bool = False


def token_f1(answer: str, reference: str) -> float:
    """F1 of the words that both have, without case, punctuation and articles (LongBench, questions)."""
    one, other = _normal(answer), _normal(reference)
    shared = sum((Counter(one) & Counter(other)).values())
    return 2 * shared / (len(one) + len(other)) if shared else 0.0


def _normal(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


_QUESTION = Kind(
    token_f1, "{context}\n\nAnswer the question with a few words of the text.\n\nQuestion: {input}\nAnswer:"
)


def rouge_l(answer: str, reference: str) -> float:
    """F1 of the longest common subsequences of sentences, as sets of different words (LongBench, summaries)."""
    given, wanted = _sentences(answer), _sentences(reference)
    words = [{word for sentence in sentences for word in sentence} for sentences in (given, wanted)]
    if not all(words):
        return 0.0
    common = {word for one in wanted for other in given for word in _common_subsequence(one, other)}
    return 2 * len(common) / (len(words[0]) + len(words[1])) if common else 0.0


def _sentences(text: str) -> list[list[str]]:
    return [sentence.split() for sentence in text.split(".") if sentence.split()]


def _common_subsequence(one: Words, other: Words) -> list[str]:
    """A longest common subsequence; of several the one whose words come first in ``other``."""
    lengths = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, word in enumerate(one):
        for j, its in enumerate(other):
            lengths[i + 1][j + 1] = lengths[i][j] + 1 if word == its else max(lengths[i][j + 1], lengths[i + 1][j])
    found, i, j = list[str](), len(one), len(other)
    while i and j:
        if one[i - 1] == other[j - 1]:
            found.append(one[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


_SUMMARY = Kind(rouge_l, "{context}\n\nWrite a summary of the text. {input}\nSummary:")


def class_share(answer: str, reference: str, classes: Words) -> float:
    """1 over the number of class names in the answer if the right one is among them (LongBench, few-shot)."""
    named = [name for name in classes if name in answer]
    # A class whose name is part of the right one's does not count.
    named = [name for name in named if name == reference or name not in reference]
    return 1 / len(named) if reference in named else 0.0


_CLASS = Kind(class_share, "{context}\n{input}", first_line=True, classes=True)


def code_similarity(answer: str, reference: str) -> float:
    """Similarity of the answer's first line that is code, in steps of 0.01 (LongBench, completion)."""
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in NOT_CODE)), "")
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


_CODE = Kind(code_similarity, "{context}{input}")


def number_share(answer: str, reference: str) -> float:
    """The share of numbers in the answer that are the reference's last one (LongBench, counting and retrieval)."""
    wanted = re.findall(r"\d+", reference)
    numbers = re.findall(r"\d+", answer)
    return numbers.count(wanted[-1]) / len(numbers) if numbers and wanted else 0.0


# LongBench's tasks: kind and tokens of an answer. Its Chinese questions and summaries are scored by words that
# a segmentation makes, which kvchat does not bring.
LONGBENCH: Mapping[str, tuple[Kind, int]] = {
    "narrativeqa": (_QUESTION, 128),
    "qasper": (_QUESTION, 128),
    "multifieldqa_en": (_QUESTION, 64),
    "hotpotqa": (_QUESTION, 32),
    "2wikimqa": (_QUESTION, 32),
    "musique": (_QUESTION, 32),
    "gov_report": (_SUMMARY, 512),
    "qmsum": (_SUMMARY, 512),
    "multi_news": (_SUMMARY, 512),
    "trec": (_CLASS, 64),
    "lsht": (_CLASS, 64),
    "triviaqa": (Kind(token_f1, "{context}\n{input}", first_line=True), 32),
    "samsum": (Kind(rouge_l, "{context}\n{input}", first_line=True), 128),
    "passage_count": (Kind(number_share, "{context}\n\nHow many different paragraphs are there?\nNumber:"), 32),
    "passage_retrieval_en": (
        Kind(number_share, "{context}\n\nWhich paragraph is this of?\n{input}\nParagraph"),
        32,
    ),
    "passage_retrieval_zh": (Kind(number_share, "{context}\n\n{input}\n"), 32),
    "lcc": (_CODE, 64),
    "repobench-p": (_CODE, 64),
}


def longbench(folder: Path) -> Iterator[Item]:
    """The rows of every task whose file the folder has.

    Raises:
        UsageError: an unknown task, or a bad row.
    """
    prompts = _published_prompts(folder)
    for file in files(folder):
        task = file.stem.removesuffix("_e")  # LongBench-E: the same tasks
        if task not in LONGBENCH:
            raise UsageError(f"{file} is not a LongBench task that can be scored.", did_you_mean(task, LONGBENCH))
        kind, tokens = LONGBENCH[task]
        for line in lines(file):
            prompt = _filled(prompts.get(task, kind.prompt), line)
            yield Item(task, line.within(folder), prompt, task not in CONTINUED, tokens, _longbench_score(kind, line))


def _published_prompts(folder: Path) -> Mapping[str, str]:
    for file in folder.rglob(PROMPTS):
        try:
            prompts = json.loads(read_text(file))
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} cannot be read.", f"{error}.", "Download the data set again.") from None
        if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
            raise UsageError(
                f"{file} is not valid.",
                "It does not have a prompt for each task.",
                "Use the file published by LongBench.",
            )
        return prompts
    return {}


def _filled(prompt: str, line: Line) -> str:
    """The prompt with the row's texts; a text that has the other's mark in it stays as it is."""
    before, _, after = prompt.partition("{context}")
    parts = [part.replace("{input}", line.text("input")) for part in (before, after)]
    return parts[0] + line.text("context") + parts[1]


def _longbench_score(kind: Kind, line: Line) -> Score:
    references = line.texts("answers")
    classes = [line.texts("all_classes")] if kind.classes else []

    def score(answer: str) -> float:
        """The best of all references."""
        counted = answer.lstrip("\n").split("\n")[0] if kind.first_line else answer
        return max(kind.score(counted, reference, *classes) for reference in references)

    return score


def ruler(folder: Path) -> Iterator[Item]:
    """The rows of every task's file.

    Raises:
        UsageError: an unknown task, or a bad row.
    """
    for file in files(folder):
        task = file.parent.name if file.stem in ("validation", "test") else file.stem
        kind = next((kind for kind in RULER if task.startswith(kind)), None)
        if kind is None:
            raise UsageError(
                f"{file} is not a RULER task.",
                f"Their names begin with {', '.join(RULER)}.",
                "Rename it, or remove it from the folder.",
            )
        for line in lines(file):
            references = line.texts("outputs")
            prefix = line.text("answer_prefix") if "answer_prefix" in line.fields else ""
            yield Item(
                task,
                line.within(folder),
                line.text("input") + prefix,
                False,
                RULER[kind],
                _ruler_score(kind, references),
            )


def _ruler_score(kind: str, references: tuple[str, ...]) -> Score:
    count = any_contained if kind == "qa" else contained
    return lambda answer: count(answer, references)


def aime(folder: Path) -> Iterator[Item]:
    """The problems of all files.

    Raises:
        UsageError: a bad row, or an answer that is not an integer from 0 to 999.
    """
    for file in files(folder):
        for line in lines(file):
            prompt = AIME_PROMPT.format(problem=line.text("problem", "Problem", "question"))
            yield Item(file.stem, line.within(folder), prompt, True, AIME_TOKENS, _aime_score(line))


def _aime_score(line: Line) -> Score:
    text = line.text("answer", "Answer")
    if not text.isdecimal() or int(text) > HIGHEST:
        raise line.refusal(f"Its answer {text[:40]!r} is not an integer from 0 to 999.")
    return lambda answer: float(final_integer(answer) == int(text))


def contained(answer: str, references: Words) -> float:
    """The share of the references that the answer contains, without case (RULER)."""
    return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def any_contained(answer: str, references: Words) -> float:
    """True if the answer contains one of the references, without case (RULER, questions)."""
    return float(any(reference.lower() in answer.lower() for reference in references))


def final_integer(answer: str) -> int | None:
    """The integer in the answer's last box, else its last number, if it may answer an AIME problem."""
    boxed = re.findall(r"\\boxed\s*\{\s*\$?\s*(\d+)\s*\$?\s*\}", answer)
    numbers = boxed or re.findall(r"(?<![\d.,])\d+(?![\d]|[.,]\d)", answer)
    found = int(numbers[-1]) if numbers else HIGHEST + 1
    return found if found <= HIGHEST else None


QUESTIONS: dict[str, Callable[[Path], Iterator[Item]]] = {"longbench": longbench, "ruler": ruler, "aime": aime}
