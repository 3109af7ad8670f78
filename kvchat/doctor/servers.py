"""Commands that ``kvchat doctor`` suggests to start a model server, with K/V options that suit this machine.

Options and their units are those of llama.cpp of October 2026, vLLM 0.32 and SGLang 0.5.23 by their own documentation.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from kvchat import nvml
from kvchat.doctor.installation import Check
from kvchat.kv.memory import available
from kvchat.nvml import GpuInfo

SHARE = 4  # K/V get 1 / SHARE of free RAM; the weights may need RAM too
FP8 = (8, 9)  # the first compute capability with FP8 arithmetic
LEAST_RATIO = 1.1  # SGLang's K/V need more room in RAM than on the GPUs


def checks() -> Iterator[Check]:
    gpus, free = [reader.info() for reader in nvml.all_gpus()], available.host_free()
    for name, command in commands(gpus, free).items():
        is_here = shutil.which("llama-server") if name == "llama-server" else find_spec(name.lower())
        starts = f"to start it: {command}" if command else "needs a GPU"
        yield Check(name, "ok", f"{'installed' if is_here else 'not installed'}; {starts}")


def commands(gpus: Sequence[GpuInfo], free: int) -> dict[str, str]:
    """Return a command for each server, for ``gpus`` and ``free`` bytes of free RAM; "" if it needs a GPU."""
    room, count = free // SHARE, len(gpus)
    llama = f"llama-server -m FILE.gguf -ctk q8_0 -ctv q8_0 --cache-ram {room // 2**20} --metrics"
    if not gpus:
        vllm = f"VLLM_CPU_KVCACHE_SPACE={max(room // 2**30, 1)} vllm serve MODEL --enable-prompt-tokens-details"
        return {"llama-server": llama, "vLLM": vllm, "SGLang": ""}
    split = f" --tensor-parallel-size {count}" if count > 1 else ""
    is_fp8 = all((gpu.compute_capability or (0, 0)) >= FP8 for gpu in gpus)
    vllm = f"vllm serve MODEL{split}{' --kv-cache-dtype fp8' if is_fp8 else ''} --enable-prompt-tokens-details"
    vllm += f" --kv-offloading-size {room // 2**30}" if room >= 2**30 else ""
    ratio = free / 2 / (sum(gpu.memory or 0 for gpu in gpus) or free)
    sglang = f"python -m sglang.launch_server --model-path MODEL{split}{' --kv-cache-dtype fp8_e5m2' if is_fp8 else ''}"
    sglang += f" --enable-hierarchical-cache --hicache-ratio {min(ratio, 2):.1f}" if ratio >= LEAST_RATIO else ""
    return {"llama-server": llama, "vLLM": vllm, "SGLang": f"{sglang} --enable-metrics --enable-cache-report"}
