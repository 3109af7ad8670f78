"""Tests mirror the code: ``kvchat/a/b.py`` is tested in ``tests/a/test_b.py`` or ``tests/a/test_b_<aspect>.py``.

Where a file is tested through what it is a part of ``TESTED_IN`` says in which.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE, TESTS = ROOT / "kvchat", ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))
TEST_FILES = [path for path in FILES if path.name.startswith("test_")]

# What has no file of its own to mirror, and why.
EXCEPTIONS = {
    "test_dependencies": "what pyproject.toml asks for",
    "test_gpu_script": ".ci/gpu",
    "test_long_chat_script": ".ci/long_chat.py",
    "test_imports": "the layers of the whole package",
    "test_layout": "the tests themselves",
    "test_plugin_mode": "a KV mode of another package",
    "test_readme": "the README",
    "test_style": "lint, format and types",
    "test_sweeps_script": ".ci/sweeps",
    "test_wheel": "the built package",
    "test_words": "the words of the whole package",
    "engine/model/test_architectures": "every supported architecture, through the whole model package",
    "engine/test_cuda": "graphs and streams on a GPU",
    "engine/test_walks": "the files from the session down to what is copied",
    "fake_cuda/test_fake_cuda": "tests/support/fake_cuda",
    "fake_cuda/test_modes_on_fake_cuda": "tests marked cuda, on the fake CUDA device",
    "fake_cuda/test_races": "tests/support/fake_cuda/races.py",
    "fake_cuda/test_tape": "tests/support/fake_cuda/tape.py",
    "kv/modes/test_every_mode": "all modes against the reference",
    "kv/ops/triton/test_compile": "all kernels, compiled for GPUs",
    "kv/test_properties": "all modes over random conversations",
    "kv/test_readback": "no step of any mode waits for the device",
}

# Files that are tested through what they are a part of: of each the test file, and of ``THIN`` lines or fewer none.
THIN = 40
TESTED_IN = {
    "bench/decoding": "bench/test_decode",
    "bench/environment": "bench/test_decode",
    "bench/llama_cpp_process": "bench/test_llama_cpp",
    "bench/mode_run": "bench/test_decode",
    "bench/model_choice": "cli/test_bench",
    "bench/paper/asr_kf_egr": "bench/paper/test_studies",
    "bench/paper/freekv": "bench/paper/test_studies",
    "bench/paper/lazy_pruning": "bench/paper/test_studies",
    "bench/paper/study": "bench/paper/test_studies",
    "bench/paper/synckv": "bench/paper/test_studies",
    "bench/plot/paper": "bench/paper/test_studies",
    "bench/reading": "bench/test_recall",
    "bench/rounds": "bench/test_decode",
    "bench/summaries": "bench/test_report",
    "cli/bench_options": "cli/test_bench",
    "cli/bench_report": "bench/test_report",
    "cli/bench_speed": "cli/test_bench",
    "cli/calibrate": "engine/test_calibration",
    "cli/profile": "config/test_profiles",
    "cli/session": "cli/test_ask",
    "engine/keep/page_file_rows": "engine/keep/test_keeper_hybrid",
    "engine/keep/sources": "engine/keep/test_keeper",
    "engine/generate/forged": "engine/generate/test_escaping",
    "engine/model/each_weight": "engine/model/test_weights_progress",
    "engine/model/description": "engine/model/test_load",
    "engine/model/loaded_sizes": "engine/model/test_free_memory",
    "engine/model/gguf_file": "engine/model/test_load_gguf",
    "engine/model/packed_rows": "engine/model/test_int4_rows",
    "engine/model/reading": "engine/model/test_load",
    "engine/model/resumable": "engine/model/test_hub",
    "engine/synthetic_text": "engine/test_needle",
    "engine/tokens": "engine/test_session_doors",
    "kv/geometry": "kv/memory/test_budget",
    "kv/memory/parked": "engine/keep/test_keeper",
    "kv/memory/side_stream": "kv/memory/test_prefill_staging",
    "kv/ops/choose": "kv/ops/test_compiled",
    "kv/ops/compiled_eight_bit": "kv/ops/test_cpu_products",
    "kv/ops/compiled_freeze": "kv/modes/test_freeze_timers_cpu",
    "kv/ops/compiled_in_a_row": "kv/ops/test_cpu_products",
    "kv/ops/compiled_scattered": "kv/ops/test_cpu_products",
    "kv/ops/torch_ops": "kv/modes/test_every_mode",
    "kv/ops/triton/language": "kv/ops/triton/test_select",
    "kv/ops/triton/weights": "kv/ops/triton/test_attend",
    "kv/state": "kv/test_manager",
    "protocol/comparing": "protocol/test_wire",
    "protocol/details": "protocol/test_wire",
    "protocol/figures": "protocol/test_wire",
    "protocol/messages": "protocol/test_wire",
    "tui/action": "tui/test_actions",
    "tui/config": "tui/test_app",
    "tui/pins": "tui/commands/test_pins",
    "tui/plain/figures": "tui/plain/test_chat",
    "tui/prompt/arguments": "tui/test_command_offers",
    "tui/view": "tui/plain/test_view",
    "tui/widgets/bars": "tui/widgets/test_badges",
    "tui/widgets/messages": "tui/screens/test_chat",
    "tui/widgets/suggestions": "tui/widgets/test_composer",
}


def name_of(path: Path) -> str:
    return path.relative_to(TESTS).with_suffix("").as_posix()


def mirrored(path: Path) -> Path | None:
    """The file or package that a test file mirrors; None if there is none."""
    words = path.stem.removeprefix("test_").split("_")
    folder = PACKAGE / path.relative_to(TESTS).parent
    candidates = [folder / "_".join(words[:n]) for n in range(len(words), 0, -1)]
    return next((file for file in candidates if file.with_suffix(".py").exists()), None)


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module and every name imported anywhere in a file, dotted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_tests(tree: ast.AST) -> list[str]:
    """Imports with a ``test_`` part; the names of kvchat and of libraries have none."""
    return [name for name in imported(tree) if any(part.startswith("test_") for part in name.split("."))]


def test_no_file_imports_a_test_file() -> None:
    found = {name_of(path): imported_tests(ast.parse(path.read_text())) for path in FILES}
    assert len(found) > 400
    assert not {name: names for name, names in found.items() if names}


def test_a_test_file_mirrors_a_file_of_the_package() -> None:
    assert {name_of(path) for path in TEST_FILES if mirrored(path) is None} == EXCEPTIONS.keys()


def test_every_file_of_substance_has_a_test_file_of_its_name_or_says_where_it_is_tested() -> None:
    own = {mirrored(path) for path in TEST_FILES}
    files = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")}
    without = {name for name, path in files.items() if path.with_suffix("") not in own and path.stem != "__init__"}
    assert TESTED_IN.keys() <= without, "a test file of its name is enough"
    silent = without - TESTED_IN.keys()
    assert not {name: lines for name in silent if (lines := len(files[name].read_text().splitlines())) > THIN}


def test_the_files_that_test_others_exist() -> None:
    assert set(map(name_of, TEST_FILES)) >= {*TESTED_IN.values()}


def test_a_forbidden_import_is_found() -> None:
    code = (
        "from kv.modes.test_every_mode import ROWS\nimport engine.test_cuda\nfrom kv import test_manager\nimport json"
    )
    assert len(imported_tests(ast.parse(code))) == 3


def test_the_top_level_holds_what_the_design_names() -> None:
    if not (shutil.which("git") and (ROOT / ".git").exists()):
        pytest.skip("no checkout of git")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tops = {name.partition("/")[0] for name in listed.stdout.splitlines()}
    named = {"pyproject.toml", "kvchat", "themes", "tests", "README.md", "LICENSE"}
    assert {name for name in tops if not name.startswith(".")} == named
