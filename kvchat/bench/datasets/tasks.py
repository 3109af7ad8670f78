"""The question asked of every row of LongBench, RULER and AIME, and the score of its answer.

LongBench: ``TASK.jsonl`` with ``context``, ``input``, ``answers`` and ``all_classes``. Where the folder has the
repository's ``dataset2prompt.json``, its prompts are used; else a short one of the task's kind, whose scores are not
comparable with published ones. RULER: ``TASK/validation.jsonl`` or ``TASK.jsonl`` with ``input`` and ``outputs``; the
input is the whole prompt. AIME: rows with ``problem`` and ``answer``, an integer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvchat import text_file
from kvchat.bench.datasets import scores
from kvchat.bench.datasets.json_lines import Line, files, lines
from kvchat.errors import UsageError, did_you_mean

Score = Callable[[str], float]
PROMPTS = "dataset2prompt.json"


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


_QUESTION = Kind(
    scores.token_f1, "{context}\n\nAnswer the question with a few words of the text.\n\nQuestion: {input}\nAnswer:"
)
_SUMMARY = Kind(scores.rouge_l, "{context}\n\nWrite a summary of the text. {input}\nSummary:")
_CLASS = Kind(scores.class_share, "{context}\n{input}", first_line=True, classes=True)
_CODE = Kind(scores.code_similarity, "{context}{input}")
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
    "triviaqa": (Kind(scores.token_f1, "{context}\n{input}", first_line=True), 32),
    "samsum": (Kind(scores.rouge_l, "{context}\n{input}", first_line=True), 128),
    "passage_count": (Kind(scores.number_share, "{context}\n\nHow many different paragraphs are there?\nNumber:"), 32),
    "passage_retrieval_en": (
        Kind(scores.number_share, "{context}\n\nWhich paragraph is this of?\n{input}\nParagraph"),
        32,
    ),
    "passage_retrieval_zh": (Kind(scores.number_share, "{context}\n\n{input}\n"), 32),
    "lcc": (_CODE, 64),
    "repobench-p": (_CODE, 64),
}
# Few-shot tasks and code go on with the text instead of answering a turn.
CONTINUED = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
# RULER's tasks by the beginning of their names: tokens of an answer.
RULER = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
AIME_TOKENS = 16_384
AIME_PROMPT = "{problem}\n\nReason step by step, and put the final answer within \\boxed{{}}."


def longbench(folder: Path) -> Iterator[Item]:
    """The rows of every task whose file the folder has.

    Raises:
        UsageError: an unknown task, or a bad row.
    """
    prompts = _published_prompts(folder)
    for file in files(folder):
        task = file.stem.removesuffix("_e")  # LongBench-E: the same tasks
        if task not in LONGBENCH:
            raise UsageError(f"{file} is no task of LongBench that can be scored.", did_you_mean(task, LONGBENCH))
        kind, tokens = LONGBENCH[task]
        for line in lines(file):
            prompt = _filled(prompts.get(task, kind.prompt), line)
            yield Item(task, line.within(folder), prompt, task not in CONTINUED, tokens, _longbench_score(kind, line))


def _published_prompts(folder: Path) -> Mapping[str, str]:
    for file in folder.rglob(PROMPTS):
        try:
            prompts = json.loads(text_file.read(file))
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} cannot be read.", f"{error}.", "Download the data set again.") from None
        if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
            raise UsageError(
                f"{file} is refused.",
                "It does not give a prompt for each task.",
                "Give the file that LongBench publishes.",
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
                f"{file} is no task of RULER.",
                f"Their names begin with {', '.join(RULER)}.",
                "Rename it, or take it out of the folder.",
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
    count = scores.any_contained if kind == "qa" else scores.contained
    return lambda answer: count(answer, references)


def aime(folder: Path) -> Iterator[Item]:
    """The problems of all files.

    Raises:
        UsageError: a bad row, or an answer that is no integer from 0 to 999.
    """
    for file in files(folder):
        for line in lines(file):
            prompt = AIME_PROMPT.format(problem=line.text("problem", "Problem", "question"))
            yield Item(file.stem, line.within(folder), prompt, True, AIME_TOKENS, _aime_score(line))


def _aime_score(line: Line) -> Score:
    text = line.text("answer", "Answer")
    if not text.isdecimal() or int(text) > scores.HIGHEST:
        raise line.refusal(f"Its answer {text[:40]!r} is no integer from 0 to 999.")
    return lambda answer: float(scores.final_integer(answer) == int(text))


QUESTIONS: dict[str, Callable[[Path], Iterator[Item]]] = {"longbench": longbench, "ruler": ruler, "aime": aime}
