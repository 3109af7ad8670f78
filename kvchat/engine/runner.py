"""ModelRunner: prefill and decode steps of a model with a KV manager; on a GPU a decode step is one CUDA graph.

The first step of a kind runs eagerly, as the warm-up that a capture needs. The second is captured and replayed from
then on, so that the CPU launches one graph per token. ``KVManager.graph_key`` tells kinds apart: by the mode, its kind
of step, and the addresses of its tensors. After slots grow or the mode switches, the next two steps warm up and capture
again. A step that cannot be captured runs eagerly, and ``refusal`` says why.

The memory of a prefill besides weights and K/V depends on layer widths, intermediate results that the model's code
keeps, experts and quantized weights. It is proportional to the tokens, so two short forward passes measure it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from weakref import WeakSet

import torch
from torch import Tensor

from kvchat.engine.escaping import control_ids
from kvchat.errors import UsageError
from kvchat.kv.attention import AttentionSpec
from kvchat.kv.geometry import GROWTH_HEADROOM, Geometry
from kvchat.kv.manager import Checkpoint, KVManager, explained, is_out_of_memory
from kvchat.kv.modes.base import Mode, ModelTraits
from kvchat.kv.modes.sync_heads import Calibration, TokenChoice
from kvchat.kv.ops import host_attention
from kvchat.kv.prefill import CHUNKS, prefill_chunk
from kvchat.models import attention_hook
from kvchat.models.load import LoadedModel
from kvchat.models.quantize.rows import ThreadBudget, without_onednn
from kvchat.models.recurrent import TAIL, RecurrentState

# Tokens per prefill chunk on a CPU. Smaller chunks can be stopped sooner and need less workspace, larger ones read the
# stored K/V less often: on two cores 512 is within 3 % of the best for the bundled model.
CHUNK = 512
MEASURED_TOKENS = 1024
Replay = Callable[[], None]
# Graphs kept for one mode: sync needs one per phase; other kinds come and go as a conversation grows.
MAX_GRAPHS = 16


def geometry_of(model: LoadedModel) -> Geometry:
    m = model
    headroom = GROWTH_HEADROOM[m.device.type]
    unified = m.device.type == "cpu"
    return Geometry(m.layers, m.q_heads, m.kv_heads, m.d_k, m.d_v, m.dtype, headroom=headroom, unified=unified)


def traits_of(
    model: LoadedModel, calibration: Calibration | None = None, choice: TokenChoice | None = None
) -> ModelTraits:
    """Return what modes need to know about the model, with a ``calibration`` or ``choice`` measured earlier."""
    choice = choice or (calibration.choice if calibration else None)
    return ModelTraits(model.context, model.probe.rotations, model.probe.refusal, calibration, choice)


class ModelRunner:
    """Runs a model's tokens through a KV manager.

    ``chunk`` is the number of tokens per prefill chunk, or None if it depends on the free memory. If memory runs out
    anyway, smaller chunks are tried, down to ``least``.
    """

    least = CHUNKS[0]

    def __init__(
        self, model: LoadedModel, mode: Mode, recorder: CudaRecorder | None = None, kv: KVManager | None = None
    ) -> None:
        self.model = model
        self._together = model.together
        self._control = control_ids(model.tokenizer)
        self.chunk = None if model.device.type == "cuda" else CHUNK
        self._token_bytes: int | None = None
        with torch.inference_mode():
            self.kv = kv or KVManager(geometry_of(model), model.device, mode)
            for layer, spec in enumerate(model.probe.specs):
                self.kv.state.note_spec(layer, spec)
            self._token = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.recurrent = RecurrentState(model.model.config, model.reads_chunks)
        eager = ""
        if len(model.devices) > 1:  # a CUDA graph's memory pool belongs to one device
            eager = f"the layers are on {len(model.devices)} GPUs"
        if model.ranks > 1:  # capturing a sum over ranks is untested on two GPUs
            eager = f"the heads are on {model.ranks} GPUs"
        if recorder is None and model.device.type == "cuda":
            recorder = CudaRecorder(model.device)
        self.graphs = GraphRunner(self.kv, recorder, eager, self.recurrent)
        self.thread_budget = ThreadBudget(model.device)

    @property
    def badges(self) -> tuple[str, ...]:
        """Return warnings about how steps run in any mode, for ``Snapshot.badges``."""
        kv = self.kv
        return *kv.state.host.badges, *kv.state.ops.badges, *self.graphs.badges

    # ---- a decode step

    def step(self, token: int) -> Tensor:
        """Store ``token``, reading what the mode chooses; return the next token's logits ``[vocab]``, float32.

        Raises:
            UsageError: the model has no such token.
            DoesNotFitError: memory ran out; nothing is stored then.
        """
        self._check_tokens((token,))
        return self._step(token, token in self._control)

    def guess(self, token: int, tokens: int, draw: Callable[[Tensor], Tensor]) -> list[int]:
        """Store ``token``, ``draw`` the next one from its logits, and so on; return the ``tokens`` drawn.

        Call it inside ``guessing``. All tokens are read back at the end, so that on a GPU no step waits for the token
        before. The last one is not stored. A token below 0, drawn from logits that are not finite, is stored as 0.

        Raises:
            DoesNotFitError: memory ran out.
        """
        drawn = torch.empty(tokens, dtype=torch.int64, device=self.model.device)
        last: int | Tensor = token
        for number in range(tokens):
            drawn[number] = draw(self._step(last))
            last = drawn[number].clamp(min=0)
        found: list[int] = drawn.tolist()
        return found

    def _step(self, token: int | Tensor, control: bool = False) -> Tensor:
        with torch.inference_mode(), explained(self.kv, "decoding"), self.thread_budget:
            self._reread()
            try:
                with self._together(1):
                    self.kv.begin_step(control)
                    self._token.fill_(token)
                    logits = self.graphs.run(self._forward)
                    self.kv.commit_step()
                    if self.recurrent.exists:
                        self.recurrent.commit([int(token)])
            except BaseException:
                self.recurrent.rollback()
                self.kv.rollback_step()
                raise
        return logits

    def _forward(self) -> Tensor:
        """Run the device's part of a step; return the logits ``[vocab]`` after the token in ``_token``."""
        self.kv.forward_begin()
        position = self.kv.mode.context_policy.model_position(self.kv.state.position).view(1)
        with without_onednn(self.model.dtype, self.model.device):
            logits = self._run(self._token, position, logits=True)
        self.kv.forward_end()
        assert logits is not None
        return logits

    def _run(self, ids: Tensor, positions: Tensor, logits: bool, last: int = 1) -> Tensor | None:
        return attention_hook.forward(
            self.model.model, ids, positions, self.kv, logits=logits, state=self.recurrent, last=last
        )

    # ---- a prefill

    def prefill(self, ids: Sequence[int]) -> Iterator[tuple[Sequence[int], Tensor | None]]:
        """Store ``ids`` chunk by chunk; yield each stored chunk, the last one with the logits ``[vocab]``.

        May be abandoned between two chunks: the yielded chunks stay stored, and the next step fills the slots first.

        Raises:
            UsageError: the model has no such token.
            DoesNotFitError: not even the smallest chunk fits in memory; the yielded chunks stay stored.
        """
        self._check_tokens(ids)
        with torch.inference_mode(), explained(self.kv, "prefilling the conversation again"):
            self._reread()
        self.recurrent.keep(before_answer=True)
        chunk_size = self.chunk or self.planned_chunk(len(ids))
        done = 0
        while done < len(ids):
            self.thread_budget.sample()  # so that the first token uses the right number of threads
            limited = min(chunk_size, self.kv.mode.context_policy.prompt_tokens(self.kv.total))
            wanted = self.recurrent.chunk(len(ids) - done, limited)
            chunk, logits = self._read_chunk(ids, done, wanted)
            if len(chunk) < wanted:
                chunk_size = len(chunk)
            done += len(chunk)
            if (left := len(ids) - done) in (TAIL, 0):
                self.recurrent.keep(before_answer=left == TAIL)
            yield chunk, logits
        with torch.inference_mode(), explained(self.kv, "answering"):
            self.kv.refill()

    def planned_chunk(self, tokens: int) -> int:
        if self._token_bytes is None:
            with explained(self.kv, "reading the prompt"):
                self._token_bytes = prefill_bytes_per_token(self.model)
        state = self.kv.state
        return prefill_chunk(state.geometry, state.total, tokens, self._token_bytes, self.model.devices)

    def _read_chunk(self, ids: Sequence[int], done: int, tokens: int) -> tuple[Sequence[int], Tensor | None]:
        """Store up to ``tokens`` of ``ids`` after the first ``done``; halve the chunk whenever memory runs out."""
        with explained(self.kv, "reading the prompt"):
            while True:
                chunk = ids[done : done + tokens]
                try:
                    return chunk, self.forward_chunk(chunk, logits=done + len(chunk) == len(ids))
                except (RuntimeError, MemoryError) as error:
                    if len(chunk) <= self.least or not is_out_of_memory(error):
                        raise
                tokens = max(self.least, len(chunk) // 2)
                # Free torch's cached blocks, which are too fragmented for a smaller forward pass.
                torch.cuda.empty_cache()

    @contextmanager
    def guessing(self) -> Iterator[None]:
        """Enter ``KVManager.guessing``, for ``step``."""
        with torch.inference_mode(), explained(self.kv, "drafting"), self.kv.guessing():
            yield

    @property
    def rows(self) -> int:
        """Return how many tokens one ``verify`` may store.

        That is the rest of the model's context, or, if pages are quantized, all but the last token of the current page,
        because a quantized page cannot be truncated.
        """
        left, state = self.model.context - self.kv.total, self.kv.state
        page = state.geometry.page
        return min(left, page - 1 - state.total % page) if state.quantizes else left

    def verify(self, ids: Sequence[int]) -> Tensor:
        """Store ``ids`` exactly in one forward pass; return the logits after each of them, ``[n, vocab]``.

        Not for a model with recurrent layers: their state cannot be truncated token by token.

        Raises:
            UsageError: the model has no such token.
            DoesNotFitError: memory ran out; nothing is stored then.
        """
        self._check_tokens(ids)
        with explained(self.kv, "verifying drafts"), self.thread_budget:
            logits = self.forward_chunk(ids, logits=True, rows=len(ids))
        assert logits is not None
        return logits

    def end_at(self, row: int) -> None:
        """Call ``KVManager.end_at`` after ``verify``; the caller then truncates the tokens after that row."""
        with torch.inference_mode():
            self.kv.end_at(row)

    def forward_chunk(self, chunk: Sequence[int], logits: bool, rows: int = 1) -> Tensor | None:
        device = self.model.device
        with torch.inference_mode():
            try:
                with self._together(len(chunk)):
                    self.kv.begin_prefill(len(chunk), verifies=rows > 1)
                    start = self.kv.total - self.kv.mode.context_policy.base_of(self.kv.total)
                    positions = torch.arange(start, start + len(chunk), device=device)
                    found = self._run(torch.tensor(chunk, device=device), positions, logits, rows)
                    self.kv.commit_prefill(len(chunk), [i for i, token in enumerate(chunk) if token in self._control])
                    self.recurrent.commit(chunk)
            except BaseException:
                self.recurrent.rollback()
                self.kv.rollback_prefill()
                raise
        return found

    def _reread(self) -> None:
        """Bring the recurrent state of a hybrid model up to date with the stored tokens; their K/V do not change."""
        if not self.recurrent.exists:
            return
        self.recurrent.restore(self.model.device)
        while unread := self.recurrent.unread:
            start, tokens = self.recurrent.position, self.recurrent.chunk(len(unread), self.chunk or CHUNKS[0])
            try:
                with self.kv.rereading(start):
                    positions = torch.arange(start, start + tokens, device=self.model.device)
                    self._run(torch.tensor(unread[:tokens], device=self.model.device), positions, logits=False)
                self.recurrent.commit_reread(tokens)
            except BaseException:
                self.recurrent.rollback()
                raise

    def truncate(self, tokens: int) -> None:
        """Forget all but the first ``tokens``.

        Raises:
            DoesNotFitError: memory ran out; the tokens are forgotten anyway, and the next step fills the slots first.
        """
        self.recurrent.truncate(tokens)
        with torch.inference_mode(), explained(self.kv, "filling the slots"):
            self.kv.truncate(tokens)

    def pin(self, positions: Sequence[int]) -> None:
        """Read the stored tokens at ``positions`` at every step, whatever the mode chooses.

        Raises:
            DoesNotFitError: they do not fit together with what the mode keeps; the earlier pins remain.
        """
        with torch.inference_mode(), explained(self.kv, "pinning"):
            self.kv.pin(positions)

    def restore(self, checkpoint: Checkpoint, ids: Sequence[int]) -> None:
        """Store the tokens of ``checkpoint`` again, with these ``ids``, after the first ``checkpoint.start`` tokens."""
        self.recurrent.truncate(checkpoint.start)
        self.kv.restore(checkpoint)
        self.recurrent.append_unread(ids)

    # ---- refusals

    def _check_tokens(self, ids: Sequence[int]) -> None:
        """Refuse ids outside the vocabulary, which on a GPU would end the whole process."""
        vocab = self.model.vocab
        unknown = next((token for token in ids if not 0 <= token < vocab), None)
        if unknown is not None:
            raise UsageError(
                f"There is no token {unknown}.",
                f"{self.model.name} has tokens 0 to {vocab - 1:,}.",
                "Use ids from this model's tokenizer.",
            )


class WithoutAttention:
    """An ``AttentionBackend`` without K/V or attention, because their memory is computed, not measured."""

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Return zeros ``[H_q, n, d_v]``."""
        return query.new_zeros((*query.shape[:2], value.shape[-1]))


def prefill_bytes_per_token(model: LoadedModel) -> int:
    """Return the device bytes that a prefill takes per token, measured by two short forward passes on a GPU."""
    high = min(MEASURED_TOKENS, model.context)
    low = high // 4
    low_bytes, high_bytes = _peak_of_forward(model, low), _peak_of_forward(model, high)
    return max(0, -(-(high_bytes - low_bytes) // (high - low)))


def _peak_of_forward(model: LoadedModel, tokens: int) -> int:
    """Return the peak bytes of a forward pass of ``tokens`` tokens above those before it, on the fullest device."""
    before = [torch.cuda.memory_allocated(device) for device in model.devices]
    for device in model.devices:
        torch.cuda.reset_peak_memory_stats(device)
    with model.together(tokens):
        positions = torch.arange(tokens, device=model.device)
        attention_hook.forward(model.model, positions % model.vocab, positions, WithoutAttention(), logits=False)
    peaks = map(torch.cuda.max_memory_allocated, model.devices)
    return max(peak - held for peak, held in zip(peaks, before, strict=True))


class CudaRecorder:
    """Captures CUDA graphs of one device; they share a memory pool, because only one runs at a time.

    Where the CPU takes part in a step (``host_attention.pauses``) one graph ends and another begins, as in vLLM's
    piecewise graphs. A replay alternates between the graphs and the CPU's work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch's default capture stream belongs to the device that was current when it was first used.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._failed: list[torch.cuda.CUDAGraph] = []

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        if not self._graphs:
            # torch asserts that a pool without graphs is empty, but cuBLAS' workspace stays in it: start a new pool.
            self._pool = torch.cuda.graph_pool_handle()
        graphs: list[torch.cuda.CUDAGraph] = []
        parts: list[Replay] = []
        capture = ExitStack()

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            parts.append(graphs[-1].replay)
            # Other threads of this process, which read the GPU's state, may call CUDA meanwhile.
            mode = "thread_local"
            capture.enter_context(torch.cuda.graph(graphs[-1], self._pool, self._stream, capture_error_mode=mode))

        def pause(work: Replay) -> None:
            capture.close()
            parts.append(work)
            begin()

        def replay() -> None:
            for part in parts:
                part()

        with torch.cuda.device(self._device), _uncollected():
            before = torch.cuda.current_stream(self._device)
            host_attention.pauses.append(pause)
            try:
                with capture:
                    begin()
                    result = run()
            except Exception:
                self._failed += graphs  # kept alive: torch's allocator still queries a failed capture
                raise
            finally:
                host_attention.pauses.pop()
                torch.cuda.set_stream(before)  # a failed capture leaves its own stream current
        self._graphs.update(graphs)
        return replay, result


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turn garbage collection off: freeing pinned memory waits for the device, which a capture does not allow."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class GraphRunner:
    """Runs the steps of a KV manager, as CUDA graphs if there is a recorder; ``refusal`` says why this mode has none.

    A ``refusal`` passed in applies to every mode. A step changes the ``recurrent`` state in place, so the state's
    addresses are part of the step's kind.
    """

    def __init__(
        self,
        kv: KVManager,
        recorder: CudaRecorder | None,
        refusal: str = "",
        recurrent: RecurrentState | None = None,
    ) -> None:
        self._always = refusal if recorder else ""
        self.refusal = self._always
        self._kv = kv
        self._recurrent = recurrent if recurrent and recurrent.exists else None
        self._recorder = recorder
        self._mode = kv.mode
        self._recorded: dict[tuple[object, ...], tuple[Replay, Tensor]] = {}
        self._warm: set[tuple[object, ...]] = set()

    @property
    def prepares(self) -> bool:
        """True if the next steps are slow, because the mode's first steps warm up and are captured."""
        return self._usable() and not self._recorded

    @property
    def badges(self) -> tuple[str, ...]:
        return (f"no CUDA graph: {self.refusal}",) if self.refusal else ()

    def run(self, step: Callable[[], Tensor]) -> Tensor:
        """Return the result of ``step``, as a tensor that the caller may keep."""
        if not self._usable():
            return step()
        state = self._recurrent.addresses if self._recurrent else ()
        kind = *self._kv.graph_key(), *state
        if kind not in self._recorded and (kind not in self._warm or not self._record(kind, step)):
            self._warm.add(kind)
            result = step()
            if self._recurrent and self._recurrent.addresses != state:
                self.refusal = "the recurrent layers move their state at each step"
            return result
        replay, result = self._recorded[kind]
        replay()
        return result.clone()

    def _usable(self) -> bool:
        if self._kv.mode is not self._mode:
            self._forget()
        # The CPU gathers from a pageable host pool, so such a step cannot be captured.
        captured = self._kv.state.host.pinned
        # The very first token runs other code in recurrent layers.
        captured = captured and (self._recurrent is None or self._recurrent.position > 0)
        return self._recorder is not None and not self.refusal and captured

    def _record(self, kind: tuple[object, ...], step: Callable[[], Tensor]) -> bool:
        assert self._recorder is not None
        if len(self._recorded) >= MAX_GRAPHS:
            self._recorded.clear()
        try:
            self._recorded[kind] = self._recorder(step)
        except Exception as error:  # noqa: BLE001  # Triton and transformers raise their own errors
            # A captured step was not executed; the caller now runs it eagerly, which raises if it cannot run at all.
            # An error at the end of a capture is only a consequence of the one inside it.
            ended = isinstance(error, torch.AcceleratorError)
            first = (error.__context__ if ended else None) or error
            self.refusal = f"{type(first).__name__}: {(str(first).splitlines() or [''])[0]}"
        return not self.refusal

    def _forget(self) -> None:
        """Drop graphs that refer to memory which the previous mode freed."""
        self._mode = self._kv.mode
        self.refusal = self._always
        self._recorded.clear()
        self._warm.clear()
