"""ModelRunner: prefill and decode steps, the model's forwards over the KV manager; on a GPU a step is one CUDA graph.

The first step of a kind runs eagerly, as the warm-up that a capture needs. The second is captured, and replayed from
then on: the processor launches one graph a token. ``KVManager.graph_key`` tells kinds apart: the mode, the kind of its
step, and the addresses of its tensors. After growth or a switch the next two steps warm up and capture again. If a step
cannot be captured it runs eagerly, and ``refusal`` says why.

The memory that a prefill takes besides weights and K/V depends on the widths of the layers, the intermediate results
that the model's code keeps, experts and quantized weights. It is proportional to the tokens, so two short forwards
measure it.
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

# Tokens of one prefill forward on a CPU. Smaller ones stop sooner and need less workspace, larger ones read the stored
# K/V less often: on two cores 512 is within 3 % of the best for the bundled model.
CHUNK = 512
MEASURED_TOKENS = 1024
Replay = Callable[[], None]
# Kinds of step kept of one mode: sync has as many as it has phases; more come and go as a conversation grows.
MAX_GRAPHS = 16


def geometry_of(model: LoadedModel) -> Geometry:
    m = model
    headroom = GROWTH_HEADROOM[m.device.type]
    unified = m.device.type == "cpu"
    return Geometry(m.layers, m.q_heads, m.kv_heads, m.d_k, m.d_v, m.dtype, headroom=headroom, unified=unified)


def traits_of(
    model: LoadedModel, calibration: Calibration | None = None, choice: TokenChoice | None = None
) -> ModelTraits:
    """Return what modes may need to know of the model; ``calibration`` and ``choice`` are what was measured of it."""
    choice = choice or (calibration.choice if calibration else None)
    return ModelTraits(model.context, model.probe.rotations, model.probe.refusal, calibration, choice)


class ModelRunner:
    """Runs a model's tokens through a KV manager.

    ``chunk`` is the number of tokens of one prefill forward, None if it depends on the free memory. If memory runs out
    nevertheless, fewer are tried, down to ``least``.
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
        if len(model.devices) > 1:  # torch's pool for a graph is one device's
            eager = f"its layers are on {len(model.devices)} GPUs"
        if model.ranks > 1:  # whether a sum over ranks can be captured was seen on no two GPUs yet
            eager = f"its heads are on {model.ranks} GPUs"
        if recorder is None and model.device.type == "cuda":
            recorder = CudaRecorder(model.device)
        self.graphs = GraphRunner(self.kv, recorder, eager, self.recurrent)
        self.thread_budget = ThreadBudget(model.device)

    @property
    def badges(self) -> tuple[str, ...]:
        """Warnings about how steps run, whatever the mode; for ``Snapshot.badges``."""
        kv = self.kv
        return *kv.state.host.badges, *kv.state.ops.badges, *self.graphs.badges

    # ---- a decode step

    def step(self, token: int) -> Tensor:
        """Store ``token``, reading what the mode lets it read; the next token's logits ``[vocab]``, float32.

        Raises:
            UsageError: the model has no such token.
            DoesNotFitError: memory is short. Nothing is stored then.
        """
        self._check_tokens((token,))
        return self._step(token, token in self._control)

    def guess(self, token: int, tokens: int, draw: Callable[[Tensor], Tensor]) -> list[int]:
        """Store ``token``, ``draw`` the next one from its logits, and so on; return the ``tokens`` drawn.

        Call it inside ``guessing``. All are read back at the end: on a GPU no step waits for another one's token. The
        last token is not stored. A token below 0, drawn from logits that are not finite, is stored as token 0.

        Raises:
            DoesNotFitError: memory is short.
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
        """The part of a step that runs on the device: the logits ``[vocab]`` after the token in ``_token``."""
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
        """Store ``ids`` chunk by chunk; yield each chunk once it is stored, with the last one the logits ``[vocab]``.

        May be abandoned between two chunks: what was yielded is stored, and the next step fills the slots first.

        Raises:
            UsageError: the model has no such token.
            DoesNotFitError: there is no memory for even the smallest forward; what was yielded is stored.
        """
        self._check_tokens(ids)
        with torch.inference_mode(), explained(self.kv, "reading the conversation again"):
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
        """Store the next ``tokens`` of ``ids`` after ``done`` of them; half as many whenever memory runs out."""
        with explained(self.kv, "reading the prompt"):
            while True:
                chunk = ids[done : done + tokens]
                try:
                    return chunk, self.forward_chunk(chunk, logits=done + len(chunk) == len(ids))
                except (RuntimeError, MemoryError) as error:
                    if len(chunk) <= self.least or not is_out_of_memory(error):
                        raise
                tokens = max(self.least, len(chunk) // 2)
                # The memory for smaller forwards is fragmented in torch's cache.
                torch.cuda.empty_cache()

    @contextmanager
    def guessing(self) -> Iterator[None]:
        """``KVManager.guessing``, for ``step``."""
        with torch.inference_mode(), explained(self.kv, "drafting"), self.kv.guessing():
            yield

    @property
    def rows(self) -> int:
        """Tokens that one forward of ``verify`` may store.

        Up to the model's context; if pages are quantized, at most all but the last token of the current page, because a
        quantized page cannot take tokens back.
        """
        left, state = self.model.context - self.kv.total, self.kv.state
        page = state.geometry.page
        return min(left, page - 1 - state.total % page) if state.quantizes else left

    def verify(self, ids: Sequence[int]) -> Tensor:
        """Store ``ids`` exactly, in one forward; return the logits after each of them, ``[n, vocab]``.

        Not for a model with recurrent layers: their state cannot be truncated token by token.

        Raises:
            UsageError: the model has no such token.
            DoesNotFitError: memory is short. Nothing is stored then.
        """
        self._check_tokens(ids)
        with explained(self.kv, "verifying drafts"), self.thread_budget:
            logits = self.forward_chunk(ids, logits=True, rows=len(ids))
        assert logits is not None
        return logits

    def end_at(self, row: int) -> None:
        """``KVManager.end_at``, after ``verify``; truncate what follows that row next."""
        with torch.inference_mode():
            self.kv.end_at(row)

    def forward_chunk(self, chunk: Sequence[int], logits: bool, rows: int = 1) -> Tensor | None:
        device, start = self.model.device, self.kv.total - self.kv.mode.context_policy.base_of(self.kv.total)
        with torch.inference_mode():
            try:
                with self._together(len(chunk)):
                    self.kv.begin_prefill(len(chunk), verifies=rows > 1)
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
        """Bring the recurrent state of a hybrid model up to date with all stored tokens; their K/V do not change."""
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
            DoesNotFitError: memory is short; they are forgotten, and the next step fills the slots first.
        """
        self.recurrent.truncate(tokens)
        with torch.inference_mode(), explained(self.kv, "filling the slots"):
            self.kv.truncate(tokens)

    def pin(self, positions: Sequence[int]) -> None:
        """Attend to the stored tokens at ``positions`` at every step, whatever the mode keeps.

        Raises:
            DoesNotFitError: there is no room for them beside what the mode keeps; those before stay pinned.
        """
        with torch.inference_mode(), explained(self.kv, "pinning"):
            self.kv.pin(positions)

    def restore(self, checkpoint: Checkpoint, ids: Sequence[int]) -> None:
        """Store the tokens of ``checkpoint`` again, with these ``ids``, after the first ``checkpoint.start``."""
        self.recurrent.truncate(checkpoint.start)
        self.kv.restore(checkpoint)
        self.recurrent.append_unread(ids)

    # ---- refusals

    def _check_tokens(self, ids: Sequence[int]) -> None:
        """Refuse ids outside the vocabulary, which on a GPU would end the process, not only the forward."""
        vocab = self.model.vocab
        unknown = next((token for token in ids if not 0 <= token < vocab), None)
        if unknown is not None:
            raise UsageError(
                f"There is no token {unknown}.",
                f"{self.model.name} has tokens 0 to {vocab - 1:,}.",
                "Use ids from this model's tokenizer.",
            )


class WithoutAttention:
    """An ``AttentionBackend`` without K/V and attention, whose memory is computed and not measured."""

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Zeros ``[H_q, n, d_v]``."""
        return query.new_zeros((*query.shape[:2], value.shape[-1]))


def prefill_bytes_per_token(model: LoadedModel) -> int:
    """Device bytes that a forward takes for each of its tokens, measured by two short forwards on a GPU."""
    high = min(MEASURED_TOKENS, model.context)
    low = high // 4
    low_bytes, high_bytes = _peak_of_forward(model, low), _peak_of_forward(model, high)
    return max(0, -(-(high_bytes - low_bytes) // (high - low)))


def _peak_of_forward(model: LoadedModel, tokens: int) -> int:
    """Bytes at the peak of a forward of ``tokens`` tokens, above what was allocated before, on the fullest device."""
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

    If the host takes part in a step (``host_attention.pauses``) a graph ends there and another begins, as in vLLM's
    piecewise graphs. A replay runs the graphs and the host's work in turn.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch's own stream for captures is one of the device that was current when it was first wanted.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._failed: list[torch.cuda.CUDAGraph] = []

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        if not self._graphs:
            # torch asserts that a pool which all its graphs left is empty, and cuBLAS' workspace stays in it for good.
            self._pool = torch.cuda.graph_pool_handle()
        graphs: list[torch.cuda.CUDAGraph] = []
        parts: list[Replay] = []
        capture = ExitStack()

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            parts.append(graphs[-1].replay)
            # Other threads of this process (readings of the GPU's state) may go on calling CUDA meanwhile.
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
                self._failed += graphs  # kept alive: torch's allocator still asks a capture that failed to end
                raise
            finally:
                host_attention.pauses.pop()
                torch.cuda.set_stream(before)  # a capture that fails to end leaves its own
        self._graphs.update(graphs)
        return replay, result


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turn the garbage collector off: freeing pinned memory waits for the device, which a capture must not."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class GraphRunner:
    """Runs the steps of a KV manager, by graphs where there is a recorder; ``refusal`` says why this mode has none.

    A ``refusal`` that is given holds for every mode. What ``recurrent`` layers keep is changed in place by a step, and
    its addresses are part of a step's kind.
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
        """True if the next steps are slow, because the mode's first ones warm up and are captured."""
        return self._usable() and not self._recorded

    @property
    def badges(self) -> tuple[str, ...]:
        return (f"no CUDA graph: {self.refusal}",) if self.refusal else ()

    def run(self, step: Callable[[], Tensor]) -> Tensor:
        """Return the result of ``step``, which the caller may keep."""
        if not self._usable():
            return step()
        state = self._recurrent.addresses if self._recurrent else ()
        kind = *self._kv.graph_key(), *state
        if kind not in self._recorded and (kind not in self._warm or not self._record(kind, step)):
            self._warm.add(kind)
            result = step()
            if self._recurrent and self._recurrent.addresses != state:
                self.refusal = "its recurrent layers keep their state elsewhere after each step"
            return result
        replay, result = self._recorded[kind]
        replay()
        return result.clone()

    def _usable(self) -> bool:
        if self._kv.mode is not self._mode:
            self._forget()
        # A pageable host pool is gathered from by the CPU.
        captured = self._kv.state.host.pinned
        # The very first token takes another path through recurrent layers.
        captured = captured and (self._recurrent is None or self._recurrent.position > 0)
        return self._recorder is not None and not self.refusal and captured

    def _record(self, kind: tuple[object, ...], step: Callable[[], Tensor]) -> bool:
        assert self._recorder is not None
        if len(self._recorded) >= MAX_GRAPHS:
            self._recorded.clear()
        try:
            self._recorded[kind] = self._recorder(step)
        except Exception as error:  # noqa: BLE001  # Triton and transformers raise errors of their own
            # A captured step was not executed; the caller now runs it eagerly, which raises if it cannot run at all.
            # An error at the end of a capture only follows from the one inside.
            ended = isinstance(error, torch.AcceleratorError)
            first = (error.__context__ if ended else None) or error
            self.refusal = f"{type(first).__name__}: {(str(first).splitlines() or [''])[0]}"
        return not self.refusal

    def _forget(self) -> None:
        """Drop graphs that hold addresses of memory which the mode freed when it was left."""
        self._mode = self._kv.mode
        self.refusal = self._always
        self._recorded.clear()
        self._warm.clear()
