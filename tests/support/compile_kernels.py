"""Compiles every kernel as ``TritonOps`` launches it, for a GPU that this machine need not have.

Arguments: compute capability (80), dtype (bfloat16) and head size. Prints a JSON object with a list for each kernel:
shared memory in bytes, number of 16-byte loads and bytes of spilled registers of each compiled variant, with the tiles
used on that GPU.
Fails if a slightly longer conversation compiles a kernel again.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvchat.kv.attention import AttentionSpec
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import DeviceSlots, Layout
from kvchat.kv.memory.eight_bit_pool import EightBitPool
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.modes.page_index import KeyCodes, PageBounds, ValueMeans
from kvchat.kv.ops.selection import Candidates, TokenQuery
from kvchat.kv.ops.triton import attend
from kvchat.kv.ops.triton_ops import EightBitTritonOps, TritonOps
from kvchat.models.fuse import kernels

CPU = torch.device("cpu")
HEADS, GROUP, LAYERS = 8, 4, 2
TOKENS, LATER = 28_000, 29_000


def compile_instead_of_launching(capability):
    """Compile at each launch instead of running; return the compiled variants by kernel."""
    target = GPUTarget("cuda", capability, 32)
    driver.set_active(
        SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda _: 0)
    )
    compiled, run = {}, JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.setdefault(self.fn.__name__, {})[id(kernel)] = kernel
        return kernel

    JITFunction.run = compile_only
    torch.cuda.get_device_capability = lambda _device: divmod(capability, 10)
    tile = attend.tile_of(torch.device("cuda"))
    attend.tile_of = lambda _device: tile  # the tensors are on a CPU
    return compiled


def launch_everything(dtype, d, tokens):
    g = Geometry(LAYERS, HEADS * GROUP, HEADS, d, d, dtype)
    ops = TritonOps(g, HostPool(g, CPU), CPU)
    position = torch.tensor(tokens)
    ops.begin_step(position)
    query, key = (torch.zeros(heads, 1, d, dtype=dtype)[:, 0] for heads in (HEADS * GROUP, HEADS))
    bounds = PageBounds(g, CPU)
    bounds.reserve(tokens)
    ops.update_bounds(bounds.of(0), torch.zeros(1, dtype=torch.int64), key)
    scores = ops.page_scores(query, bounds.of(0), 0.1)
    flagged = ops.needs_correction(query, query, 0.8)
    everything = Layout(0, LAYERS, 0, tokens)
    resident = Layout(0, LAYERS, 0, 4096, spills=True)
    followers = Layout(0, LAYERS, 4, 512, 32, shared=False, heads=((0, 2, 3, 5, 6),) * LAYERS)
    pages = Layout(0, LAYERS, 512, 512, 32, shared=False)
    plain, odd = AttentionSpec(0.1), AttentionSpec(0.1, 4096, 30.0, torch.zeros(HEADS * GROUP, dtype=dtype))
    counters = torch.zeros((2, 3), dtype=torch.int64)[int(tokens == LATER), :3]  # later, the second row: not aligned
    for layout, spec in ((everything, odd), (followers, odd), (pages, plain)):
        slots, layer = DeviceSlots(layout, g, CPU), int(tokens == LATER)
        ops.append([slots], layer, key, key)
        for weigh in (False, True):
            _, weights = ops.attend(slots, layer, query, spec, weigh)
        weights.best()
        weights.add_shares(torch.zeros(slots.n), torch.zeros(slots.n), torch.zeros(()))
        held = slots.pages_of(layer)
        if layout.pages:
            ops.open_pages(slots, slice(0, 1), 4, position)
            ops.move_pages(slots, layer, held.clone(), held, counters)
            ops.move_tokens(slots, layer, 5, held.clone(), held, counters)
        else:
            many = torch.zeros(64, dtype=torch.int64)
            ops.move_shared(slots, many, many, many > 0)
    for spec, beside in ((plain, None), (odd, None), (plain, lambda: torch.zeros(HEADS, GROUP, d + 1))):
        slots = DeviceSlots(resident, g, CPU)
        slots.on_cpu, slots.other_part = range(tokens - 5000, tokens), beside
        ops.attend(slots, int(tokens == LATER), query, spec, False)
    candidates = Candidates.between(1, position, bounds.pages)
    for flags in (None, flagged):
        ops.choose(scores, candidates, held, flags)
    ops.choose(torch.zeros(HEADS, GROUP, 8000), candidates, torch.zeros(HEADS, 128, dtype=torch.int64))
    means = ValueMeans(g, CPU)
    means.reserve(tokens)
    for bits in (2, 4):
        codes = KeyCodes(g, CPU, bits=bits)
        codes.reserve(tokens)
        ops.encode_keys(torch.zeros((HEADS, tokens - tokens % 5, d), dtype=dtype), bits)
        ops.token_scores(query, codes.of(0), bits, 0.1)
        neither = torch.zeros(codes.pages * g.page, dtype=torch.bool)
        for k in (476, 4096):
            held = torch.zeros((HEADS, 4200), dtype=torch.int32)[:, :k]
            ops.choose_tokens(TokenQuery(query, codes.of(0), bits, 0.1, means.of(0)), neither, neither, held)


def launch_over_8_bit_pages(dtype, d, tokens):
    """Launch the kernels that read or write the host pool."""
    g = Geometry(LAYERS, HEADS * GROUP, HEADS, d, d, dtype)
    host = EightBitPool(HostPool(g, CPU))
    ops, layer = EightBitTritonOps(g, host, CPU), int(tokens == LATER)
    ops.begin_step(torch.tensor(tokens))
    query, key = (torch.zeros(heads, 1, d, dtype=dtype)[:, 0] for heads in (HEADS * GROUP, HEADS))
    counters = torch.zeros((2, 3), dtype=torch.int64)[layer]
    for heads in (None, ((0, 2, 3, 5, 6),) * LAYERS):
        slots = DeviceSlots(Layout(0, LAYERS, 4, 512, 32, shared=False, heads=heads), g, CPU)
        ops.append([slots], layer, key, key)
        held = slots.pages_of(layer)
        ops.move_pages(slots, layer, held.clone(), held, counters)
        ops.move_tokens(slots, layer, 5, held.clone(), held, counters)
    many = torch.zeros(64, dtype=torch.int64)
    ops.move_shared(DeviceSlots(Layout(0, LAYERS, 0, 512, unordered=True), g, CPU), many, many, many > 0)
    ops.attend(DeviceSlots(Layout(0, LAYERS, 0, 4096, spills=True), g, CPU), layer, query, AttentionSpec(0.1), False)


def launch_fused_layers(dtype, d):
    """Launch a decoded token's norms, projections and MLP, with the width of an 8B model."""
    hidden, inner = 4096, 14_336
    x, norm = torch.zeros((1, 1, hidden), dtype=dtype), torch.zeros(hidden, dtype=dtype)
    rows = (HEADS * GROUP + 2 * HEADS) * d, 2 * inner
    merged, gate_up = (torch.zeros((n, hidden), dtype=dtype) for n in rows)
    down = torch.zeros((hidden, inner), dtype=dtype)
    for in_8_bits in (False, True):
        merged, gate_up, down = (each.to(torch.int8) if in_8_bits else each for each in (merged, gate_up, down))
        scales = [torch.zeros(len(each)) if in_8_bits else None for each in (merged, gate_up, down)]
        for turns in (None, ((HEADS * GROUP + HEADS) * d, *x.new_zeros((2, 1, 1, d)))):
            kernels.project(x, merged, x.new_zeros(len(merged)), norm, 1e-6, scales=scales[0], turns=turns)
        kernels.project(torch.zeros((1, 1, inner), dtype=dtype), down, residual=x, scales=scales[2])
        kernels.gated(x, gate_up, norm, 1e-6, scales[1])
    query, key = (torch.zeros((1, heads, 1, d), dtype=dtype) for heads in (HEADS * GROUP, HEADS))
    for norms in ((), ((query.new_zeros(d), 1e-6),) * 2):
        kernels.rotate(query, key, *torch.zeros((2, 1, 1, d), dtype=dtype), norms)


def main():
    capability, dtype, d = int(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3])
    compiled = compile_instead_of_launching(capability)
    launch_everything(dtype, d, TOKENS)
    launch_over_8_bit_pages(dtype, d, TOKENS)
    launch_fused_layers(dtype, d)
    before = {name: set(variants) for name, variants in compiled.items()}
    launch_everything(dtype, d, LATER)
    launch_over_8_bit_pages(dtype, d, LATER)
    assert before == {name: set(variants) for name, variants in compiled.items()}, (
        "a longer conversation compiles again"
    )
    found = {
        name: [
            (kernel.metadata.shared, wide_loads(kernel.asm["ptx"]), spilled(kernel.asm["cubin"]))
            for kernel in variants.values()
        ]
        for name, variants in compiled.items()
    }
    assert all("cubin" in kernel.asm for variants in compiled.values() for kernel in variants.values())
    json.dump(found, sys.stdout)


def wide_loads(ptx):
    return sum((".v4.b32" in line and "ld.global" in line) or "cp.async.cg" in line for line in ptx.splitlines())


def spilled(cubin):
    """Bytes of a thread's stack, 0 if no instruction loads from it or stores to it: a call may reserve it unused."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = output_of(tools / "cuobjdump", "-res-usage", file.name)
        stack = sum(map(int, re.findall(r"STACK:(\d+)", usage)))
        return stack if stack and re.search(r"\b(STL|LDL)\b", output_of(tools / "nvdisasm", "-c", file.name)) else 0


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
