"""The public Python API: load a model, chat with it, and switch its KV mode between two tokens."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvchat.config import modes
from kvchat.config.modes import AutoParameters, ModeParameters
from kvchat.engine import calibration, synthetic_text
from kvchat.engine.answer import AnswerLoop, Released
from kvchat.engine.compare import Comparison
from kvchat.engine.detokenizer import hold_back
from kvchat.engine.metrics import MetricsCollector
from kvchat.engine.mode_switcher import ModeSwitcher, is_quantized
from kvchat.engine.prefix_cache import LAST_WRITES_S, PrefixCache
from kvchat.engine.prompt import Stored
from kvchat.engine.ranks.leader import Followers, LeadingKV, LeadingRunner
from kvchat.engine.recovery import REGENERATE_TOKENS
from kvchat.engine.runner import ModelRunner, geometry_of
from kvchat.errors import UsageError
from kvchat.kv.inspect import attended
from kvchat.kv.manager import explained
from kvchat.models.load import LoadedModel, load_model
from kvchat.models.quantize import int4_rows
from kvchat.models.ranks import heads
from kvchat.protocol.figures import Params, Price, Snapshot
from kvchat.protocol.messages import (
    Details,
    Event,
    HostDtype,
    Keeping,
    Load,
    Loaded,
    NeedleHidden,
    Resumed,
    Sampling,
    Split,
    Switched,
    Text,
    Turn,
    Variant,
)

T = TypeVar("T")
LOOKING = "inspecting the stored tokens"
_loaded_by: list[int] = []  # the process that loaded the first model; its forks inherit it


def load(
    model: str | Path = Load.model,
    *,
    device: str = Load.device,
    gpus: int = Load.gpus,
    split: Split = Load.split,
    dtype: str = Load.dtype,
    mode: str = Load.mode,
    system: str | None = None,
    mode_params: Mapping[str, Params] | None = None,
    quantize: str = Load.quantize,
    fast: bool = Load.fast,
    force: bool = Load.force,
    host_dtype: HostDtype = Load.host_dtype,
    chat_template: str | Path = Load.chat_template,
    template_args: Sequence[str] = Load.template_args,
    progress: Callable[[str], None] = lambda stage: None,
    **params: Any,
) -> Session:
    """Load a model and open a session with it.

    Args:
        model: ``bundled``, a folder or a hub repository.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        gpus: number of GPUs to split a large model over.
        split: ``layers`` (one device has all K/V), or ``heads``: one process per GPU, with its part of every layer and
            of the K/V. If one of these processes ends, this process ends too.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        mode: the first KV mode; ``auto`` lets kvchat choose.
        system: system prompt of ``Session.chat``.
        mode_params: settings of each mode, used when it is entered; ``params`` override them.
        quantize: ``auto`` (GGUF and other packed weights stay packed), ``none``, ``int8`` or ``int4`` (on a GPU
            torchao's), ``nf4`` (bitsandbytes).
        fast: replace small parts of the model by faster implementations.
        force: load a model even if its weights do not fit the free memory.
        host_dtype: the number format of full K/V pages: the ``model``'s, or ``int8``.
        chat_template: a file with a chat template in place of the model's own.
        template_args: variables of the chat template, each as ``KEY=VALUE``.
        progress: called with each stage of loading.
        params: the mode's parameters, such as ``budget``.

    Raises:
        ModelError: the model cannot be found, read or supported.
        UsageError: the mode, a parameter, the device or the dtype is unknown.
        DoesNotFitError: there is not enough memory.
    """
    asked = Load(
        model=str(model),
        device=device,
        gpus=gpus,
        split=split,
        dtype=dtype,
        quantize=quantize,
        fast=fast,
        force=force,
        mode=mode,
        mode_params=dict(mode_params or {}),
        given={mode: params},
        host_dtype=host_dtype,
        chat_template=str(chat_template),
        template_args=tuple(template_args),
    )
    return open_session(asked, progress, system)


def open_session(
    asked: Load, progress: Callable[[str], None] = lambda stage: None, system: str | None = None
) -> Session:
    """Load the model that ``asked`` names and open a session; ``progress`` is called with each stage.

    Raises:
        KvchatError: the same as ``load``.
    """
    _check_loading()
    is_quantized(asked.host_dtype)
    for name, params in ((asked.mode, {}), *asked.mode_params.items(), *asked.given.items()):
        modes.parse(name, params)
    if asked.gpus == 1 or asked.split == "layers":
        return Session(load_model(asked, progress), asked, system)
    followers = Followers(asked)
    try:
        return Session(load_model(asked, progress, followers.meet), asked, system, followers)
    except BaseException:
        followers.close()
        raise


class Session(Released):
    """One conversation with one model, usable by one thread at a time in the process that loaded it.

    ``cancel`` may be called from any thread. Otherwise, while one thread changes something, others get a UsageError.
    One answer at a time: until its generator is read to the end or closed, another answer, ``rebuild``, ``resume``,
    ``prefill``, ``step`` and ``truncate`` raise UsageError; ``switch`` and ``cancel`` may be called.
    After ``close``, and in a forked process, anything that uses the model raises UsageError, also during an answer.

    ``asked`` are the options that ``model`` was loaded with; ``system`` is the system prompt of ``chat``. With
    ``--split heads``, ``followers`` hold the other heads.
    """

    _held = ("_runner", "_kv", "_metrics", "_switcher", "_model", "_prefix_cache")

    def __init__(
        self,
        model: LoadedModel,
        asked: Load = Load(),
        system: str | None = None,
        followers: Followers | None = None,
    ) -> None:
        stored = Stored()
        self._followers = followers
        self._model = model
        self._switcher = ModeSwitcher(model, asked, stored)
        mode = self._switcher.build(self._switcher.parameters)
        if followers is None:
            self._runner = ModelRunner(model, mode)
        else:
            kv = LeadingKV(followers, geometry_of(model), model.device, mode)
            self._runner = LeadingRunner(followers, model, mode, kv)
        self._kv = self._runner.kv
        self._kv.quantize_pages(is_quantized(asked.host_dtype))
        self._switcher.attach(self._kv)
        of_model = model.weight_bytes, model.context, model.elsewhere
        self._metrics = MetricsCollector(self._kv, self._runner.recurrent, *of_model)
        self._loop = AnswerLoop(self._runner, self._switcher, self._metrics, stored, asked.template_args)
        self._prefix_cache = PrefixCache(self._runner, self._loop, Keeping() if followers else asked.keeping)
        self._turns = (Turn("system", system),) if system else ()
        if asked.mode == modes.AUTO:
            self.switch(modes.AUTO)

    # ---- talking

    def chat(self, text: str, sampling: Sampling = Sampling()) -> Iterator[str]:
        """Answer ``text`` in the conversation that the session remembers; yield pieces of text.

        Raises:
            UsageError: the prompt is empty or a setting is out of range.
            DoesNotFitError: the conversation is longer than the model's context, or memory ran out.
        """
        self._loop.announce()
        return self._loop.lock.in_turn(self._saving(self._chat(text, sampling)))

    def _chat(self, text: str, sampling: Sampling) -> Generator[str, None, None]:
        turns = (*self._turns, Turn("user", text))
        answer = ""
        try:
            for event in hold_back(self._loop.answer(turns, sampling, _nothing), lambda: self.withdrawable):
                if isinstance(event, Text):
                    answer += event.text
                    yield event.text
        finally:
            if answer:
                self._turns = (*turns, Turn("assistant", answer))

    def answer(
        self,
        turns: Sequence[Turn],
        sampling: Sampling,
        between: Callable[[int], None] | None = None,
        conversation: str | None = "",
        variant: Variant | None = None,
        template_args: Sequence[str] | None = None,
        json_schema: str = "",
        top_logprobs: int | None = None,
        must_call: Sequence[str] = (),
    ) -> Iterator[Event]:
        """Answer the last turn: ``Started``, ``Prefilled``*, ``Text``*, then one ``Finished``.

        ``Preparing`` precedes what a mode measures, and on a GPU its first steps. ``Switched`` or ``Noted`` report what
        auto changed, before ``Started`` and between two tokens. ``between`` is called between two tokens, or two rounds
        of drafts, with the number of tokens generated so far; it may ``switch`` and ``cancel``. Only new tokens are
        prefilled.

        If ``conversation`` is not the current one, the events of ``resume`` come first. Its K/V are saved afterwards.
        None means the stored conversation that ``turns`` continue, or a new one. A ``variant`` and ``template_args``
        replace the current ones, also for later answers, unless they are None. With ``json_schema`` the answer after a
        thought is JSON that matches it; with ``must_call`` it is one call of a tool of that name; with ``top_logprobs``
        each ``Text`` has scores.

        Raises:
            UsageError: the prompt is empty, a setting is out of range, llguidance does not support the schema, or the
                model cannot be made to call a tool.
            DoesNotFitError: the conversation is longer than the model's context, or memory ran out.
        """
        self._loop.announce()
        self._apply(template_args)
        opened, entered = self._prefix_cache.open(conversation, turns), self._entered(variant)
        answer = self._loop.answer(turns, sampling, between or _nothing, json_schema, top_logprobs, must_call)
        return self._loop.lock.in_turn(self._saving(opened, entered, answer))

    def _apply(self, template_args: Sequence[str] | None) -> None:
        if template_args is not None and tuple(template_args) != self._loop.template_args:
            self._loop.set_template_args(template_args)

    def _entered(self, variant: Variant | None) -> Iterator[Event]:
        """Enter the mode of a ``variant`` unless it is active; its parameters do not count as set by the user."""
        if variant is None:
            return
        auto, chosen = self._switcher.auto, self._switcher.merged(variant.mode, variant.params)
        if isinstance(chosen, AutoParameters):
            if not auto.is_on or auto.parameters != chosen:
                auto.begin(chosen)  # the answer then enters auto's choice
        elif auto.is_on or chosen != self._switcher.parameters:
            yield self.enter(chosen)

    def tokenize(self, turns: Sequence[Turn], template_args: Sequence[str] | None = None) -> list[int]:
        """Return the ids of the prompt that ``answer`` would prefill for ``turns``.

        Raises:
            UsageError: the prompt is empty, or the model's template refuses the turns.
        """
        with self._loop.lock:
            self._apply(template_args)
            return self._loop.encoder.ids_of(self._loop.encoder.render(turns), Stored())

    def _saving(self, *works: Iterator[T]) -> Generator[T, None, None]:
        """Yield the events of ``works`` one after the other, then save the K/V that they changed."""
        with self._prefix_cache.changing():
            for work in works:
                yield from work

    def resume(self, conversation: str, turns: Sequence[Turn]) -> Iterator[Event]:
        """Park the current conversation and open another: ``Noted``*, then ``Resumed`` if some of its K/V are stored.

        Without ``turns`` it is a new conversation with nothing stored.

        Raises:
            UsageError: the model's template refuses the turns, or too much is pinned.
        """
        self._loop.announce()
        return self._loop.lock.in_turn(self._resume(conversation, turns))

    def _resume(self, conversation: str, turns: Sequence[Turn]) -> Generator[Event, None, None]:
        if conversation == self._prefix_cache.current and self._kv.total:
            yield Resumed(conversation, self._kv.total, 0.0, "")
        yield from self._saving(self._prefix_cache.resume(conversation, turns))
        self._loop.pin(turns)

    def forget(self, conversation: str) -> None:
        """Delete all K/V of a deleted conversation; call it after its file was moved away."""
        with self._loop.lock:
            self._loop.lock.check_idle()
            self._prefix_cache.forget(conversation)

    def cancel(self) -> None:
        """End the answer after the current token or prefill chunk; callable from any thread at any time.

        An answer that has been requested but not started ends at once; without an answer nothing happens.
        """
        self._loop.cancel()

    @property
    def token_ids(self) -> list[int]:
        """The ids generated by the last answer."""
        return self._loop.token_ids

    @property
    def withdrawable(self) -> int:
        """Number of an answer's last tokens that recovery may still withdraw; 0 without recovery."""
        return REGENERATE_TOKENS if self._switcher.parameters.recovery else 0

    # ---- comparing modes

    def compare(self, turns: Sequence[Turn], variants: Sequence[Variant], sampling: Sampling) -> Iterator[Event]:
        """Answer the last turn once in each variant, from the same K/V; ``Comparing`` events, then one ``Compared``.

        Afterwards stored tokens, mode and parameters are as before, even if it is canceled, closed or fails.

        Raises:
            UsageError: the same as ``answer``, or a variant's mode or parameter is unknown.
            DoesNotFitError: the same as ``answer``, or memory ran out for the checkpoint or for restoring it. In the
                latter case the next question prefills the conversation again, and the mode may be a variant's.
        """
        self._loop.announce()
        comparison = Comparison(self._loop, self._runner, self._switcher, self._metrics)
        return self._loop.lock.in_turn(self._saving(comparison.run(turns, variants, sampling)))

    def hide_needle(self, tokens: int, seed: int) -> NeedleHidden:
        """Return a conversation of about ``tokens`` tokens that asks for a fact told early; nothing stored changes.

        Raises:
            DoesNotFitError: the model's context is shorter.
        """
        self._switcher.check_context(tokens)
        case = synthetic_text.in_one_text(str(seed), tokens, self._runner.model.tokenizer)
        return NeedleHidden(case.turns, case.answer, synthetic_text.ANSWER_TOKENS)

    # ---- single tokens, for callers that sample them

    def prefill(self, ids: Iterable[int] | Tensor) -> Tensor:
        """Store ``ids [n]`` after the stored tokens, exactly in any mode; return the next token's logits ``[vocab]``.

        Raises:
            UsageError: there are no ids, or one is not a token; DoesNotFitError: the conversation is longer than the
                model's context, or memory ran out.
        """
        if not (ids := _whole(ids)):
            raise UsageError("There is nothing to prefill.", "No ids were given.", "Pass at least one token id.")
        with self._loop.lock:
            self._loop.announce()
            with self._prefix_cache.changing():
                self._switcher.check_prompt(self._kv.total + len(ids))
                logits = self._loop.prefill(ids)
                self._switcher.calibrate()
        return logits

    def step(self, token: int | Tensor) -> Tensor:
        """Store ``token``, reading what the mode chooses; return the next token's logits ``[vocab]``.

        Raises:
            UsageError: the model has no such token.
            DoesNotFitError: the model's context is full, or memory ran out; nothing is stored then.
        """
        (token,) = _whole((token,))
        with self._loop.lock:
            self._loop.lock.check_idle()
            with self._prefix_cache.adding():
                return self._loop.step(token)

    def truncate(self, tokens: int) -> None:
        """Forget all but the first ``tokens`` stored tokens.

        Raises:
            UsageError: ``tokens`` is negative, or more than are stored.
        """
        with self._loop.lock:
            total = self._kv.total
            if not 0 <= tokens <= total:
                raise UsageError(
                    f"A conversation of {total:,} tokens cannot be truncated to {tokens:,}.",
                    hint=f"Use 0 to {total:,}, the number of tokens to keep.",
                )
            self._loop.announce()
            with self._prefix_cache.changing():
                self._loop.truncate(tokens)

    # ---- the KV manager

    def switch(self, mode: str = "", /, **params: Any) -> Switched:
        """Enter a mode, or change the parameters of the current one; nothing stored changes.

        With ``auto`` kvchat chooses a mode now and between answers, until another mode is named. A parameter once set
        stays set: budget for every mode, others for the mode that they were set for. Without a mode's name auto stays
        on, and its own parameters apply to any mode it enters. ``switch("auto", speculative={"window": 64})`` sets
        parameters of a mode that auto may enter.

        Raises:
            UsageError: the mode or a parameter is unknown; DoesNotFitError: it cannot be entered. The old mode stays.
        """
        return self._switched(lambda: self._switcher.switch(mode, params))

    def enter(self, parameters: ModeParameters) -> Switched:
        """Enter a mode with exactly these parameters, whatever was set before; they do not count as set.

        Raises:
            UsageError: parameters contradict each other; DoesNotFitError: it cannot be entered. The old mode stays.
        """

        def enter() -> int:
            moved = self._switcher.enter(parameters)
            self._switcher.auto.is_on = False
            return moved

        return self._switched(enter)

    def _switched(self, switch: Callable[[], int]) -> Switched:
        with self._loop.lock:
            return self._loop.switched(switch)

    def rebuild(self) -> Iterator[Event]:
        """Recompute all K/V exactly, from the first token that was computed with reduced context.

        Once 8-bit pages are turned off, the tokens in them count too.

        ``Prefilled``*, then one ``Rebuilt``; afterwards the K/V equal those of one prefill of all tokens.

        Raises:
            DoesNotFitError: the conversation is longer than the model's context, or memory ran out.
        """
        self._loop.announce()
        return self._loop.lock.in_turn(self._saving(self._loop.rebuild()))

    def keep_pages(self, host_dtype: HostDtype) -> str:
        """Store pages that fill up from now on in the model's number format or in int8; return a message about it.

        Raises:
            UsageError: the format is unknown; DoesNotFitError: no RAM for the first page. Nothing changes then.
        """
        with self._loop.lock:
            self._kv.quantize_pages(is_quantized(host_dtype))
            state, self._switcher.auto.quantizes = self._kv.state, is_quantized(host_dtype)
            if state.quantizes:
                full = state.host.quantized[: state.total // state.geometry.page]
                exact, pages = full.count(False), len(full)
                before = f" Pages that stay exact: {exact:,} of {pages:,}." if pages else ""
                return f"New K/V pages are stored in 8 bits from now on.{before}"
            quantized, pages = len(state.left_quantized), state.geometry.pages(state.total)
            stay = f" Pages in 8 bits: {quantized:,} of {pages:,}; /rebuild makes them exact." if quantized else ""
            return f"New K/V pages are stored exactly from now on.{stay}"

    def set_template_args(self, args: Sequence[str]) -> str:
        """Set these ``KEY=VALUE`` variables of the chat template for later prompts; return a message about it.

        Raises:
            UsageError: an argument is not written as KEY=VALUE.
        """
        with self._loop.lock:
            self._loop.set_template_args(args)
            ignored = self._loop.encoder.ignored
        return f"Template variables from the next question on: {', '.join(args) or 'none'}. {ignored}".rstrip()

    # ---- the current state; each call computes it

    @property
    def total(self) -> int:
        """The number of stored tokens."""
        return self._kv.total

    @property
    def model(self) -> LoadedModel:
        """The model on its device, with its tokenizer."""
        return self._model

    @property
    def info(self) -> Loaded:
        """The model and the current mode."""
        model, kv, switcher = self._model, self._kv, self._switcher
        is_split = model.ranks > 1
        parameters = heads.elements(model.model, model.ranks) if is_split else int4_rows.unpacked_elements(model.model)
        return Loaded(
            model=model.name,
            architecture=type(model.model).__name__,
            parameters=parameters,
            device=" + ".join(map(str, model.devices)),
            dtype=str(model.dtype).removeprefix("torch."),
            context=model.context,
            layers=model.layers,
            kv_heads=model.kv_heads,
            page=kv.state.geometry.page,
            kv_bytes_per_token=kv.state.geometry.token_bytes,
            mode=kv.mode.name,
            params=kv.mode.report().params,
            notes=(
                *model.notes,
                *self._loop.encoder.notes,
                *map(str, switcher.calibration_problems),
                *calibration.notes(model, kv.mode),
                *filter(None, [switcher.auto.line]),
            ),
            weights=model.weights,
            fast=model.fused,
            temperature=model.advised.temperature or 0.0,
            template_variables=self._loop.encoder.variables,
            calls=self._loop.encoder.calls,
            auto=switcher.auto.line,
        )

    def snapshot(self) -> Snapshot:
        """Return the current figures of the KV manager; cheap enough for ten calls a second.

        Raises:
            DoesNotFitError: memory ran out.
        """
        with explained(self._kv, LOOKING):
            snapshot = self._metrics.snapshot(self._loop.stored.reduced_tokens)
            badges = *snapshot.badges, *self._runner.badges
            prices, parked = self._switcher.recent_prices(), self._prefix_cache.parked_bytes
        auto = self._switcher.auto.line
        return replace(snapshot, prices=prices, badges=badges, kv_parked_bytes=parked, auto=auto)

    def details(self) -> Details:
        """Return figures by layer and KV head, and a histogram of recall times; cheap enough for two calls a second.

        Raises:
            DoesNotFitError: memory ran out.
        """
        with explained(self._kv, LOOKING):
            return self._metrics.details()

    def attended(self, layer: int) -> Tensor:
        """Return which stored tokens the last token read in ``layer``, as a bool mask ``[kv_head, total]``.

        Raises:
            UsageError: the model has no such layer; DoesNotFitError: memory ran out.
        """
        if not 0 <= layer < self._model.layers:
            raise UsageError(
                f"There is no layer {layer}.",
                f"The model has layers 0 to {self._model.layers - 1}.",
                "Use one of these.",
            )
        with explained(self._kv, LOOKING):
            return attended(self._kv.state, layer)

    def prices(self) -> tuple[Price, ...]:
        """Return the cost of switching to each of the other modes now.

        Raises:
            DoesNotFitError: memory ran out.
        """
        with explained(self._kv, LOOKING):
            return self._switcher.prices()

    def text(self, start: int, end: int) -> str:
        """Return the text of the stored tokens ``start`` to ``end``, including control tokens."""
        ids = self._loop.stored.ids[start:end]
        text: str = self._model.tokenizer.decode(ids)
        return text

    # ---- the end

    def close(self, writing_s: float = LAST_WRITES_S) -> None:
        """Write the K/V to disk, if they are saved there, and free the memory of the model and its K/V.

        The session cannot be used afterwards. May be called again.
        """
        if "_prefix_cache" in vars(self):
            self._prefix_cache.close(writing_s)
        self._loop.close()
        self._release()
        if self._followers:
            self._followers.close()
        gc.collect()  # a model's layers and its fused parts refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _nothing(_generated: int) -> None:
    """Nothing to do between two tokens."""


def _whole(ids: Iterable[int | Tensor] | Tensor) -> list[int]:
    """Return token ids as plain numbers, also from a tensor ``[n]`` or an array."""
    try:
        return [index(token) for token in (ids.tolist() if hasattr(ids, "tolist") else ids)]
    except TypeError as error:
        raise UsageError(
            "Token ids are whole numbers.",
            f"Given: a {type(ids).__name__}: {error}.",
            "Pass a list of ids or a one-dimensional tensor.",
        ) from error


def _check_loading() -> None:
    """Refuse to load a model in a fork of a process that loaded one, like ``SessionLock.check_process``."""
    _loaded_by[:] = _loaded_by or [os.getpid()]
    if os.getpid() not in _loaded_by:
        raise UsageError(
            "No model can be loaded in this process.",
            f"It is a fork of process {_loaded_by[0]}, which loaded one.",
            "Start it with the method spawn.",
        )
