"""Run the tests marked cuda on the fake CUDA device (tests/support/fake_cuda), in a separate process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.grids import WHOLE
from support.memory_faults import PLACES

ROOT = Path(__file__).parents[2]
# The long form adds freeze by the paper's rules (other numbers), comparison modes, more hybrid models (``test_graphs``
# compares their graphs on a CPU), and pinned messages in every mode.
SHORT = (
    "change_no_bit and dtype0 and not (paper or reuse or quest or raas or h2o or falcon or lfm2 or granite)"
    " or staged and not gemma or the_cpu and not (gemma or joined and 1.0)"
    " or (8_bit or pinned) and speculative or switches and reuse or resident and bfloat16 or guess and 0.6"
    " or first_layer"
)
LONG = (
    "change_no_bit and dtype0 or 8_bit and speculative or switches and (reuse or freeze-paper) or pinned or is_resident"
    " or guess or staged or the_cpu or first_layer"
)
# In one process, which loads torch and transformers and compares the kernels with the reference.
FILES = [
    *("bench/test_fixed_change_rate", "fake_cuda/test_fake_cuda", "kv/memory/test_host_pool", "kv/memory/test_pinned"),
    *("kv/test_prefill_staging", "engine/test_sampler", "engine/test_session_faults", "engine/test_auto"),
    *("engine/test_gpus", "engine/test_cuda"),
]
SELECTED = f"not test_cuda and not (fixed_share_of_tokens and 0.0) or test_cuda and ({LONG if WHOLE else SHORT})"


@pytest.mark.slow("all tests marked cuda run on the fake device")
def test_selected_tests_pass_on_the_fake_cuda_device():
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU: pytest -m cuda")
    pytest.importorskip("triton")
    options = ["-n", "0", "-q", "--fake-cuda", "-m", "cuda", "-k", SELECTED]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{file}.py" for file in FILES)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["KVCHAT_TEST_FAULTS"] = str(PLACES)
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert "skipped" not in ran.stdout.splitlines()[-1], ran.stdout[-2000:]
