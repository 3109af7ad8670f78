"""Multiplying one row in blocks of a matrix's rows, which is faster on some processors, gives the same result."""

import pytest
import torch
import torch.nn.functional as F

from kvchat.models.quantize import rows as rows_module


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Take the path that is chosen on AMD processors."""
    monkeypatch.setattr(rows_module, "in_blocks", lambda: True)


@pytest.mark.parametrize("shape", [(48,), (1, 48), (1, 1, 48)])
@pytest.mark.parametrize("rows", [1, 6, 7, 8, 64, 100])
@pytest.mark.parametrize("biased", [False, True])
def test_products_match_torch(shape, rows, biased):
    rng = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(shape, generator=rng), torch.randn(rows, 48, generator=rng)
    bias = torch.randn(rows, generator=rng) if biased else None
    product = rows_module.linear(x, weight, bias)
    torch.testing.assert_close(product, F.linear(x, weight, bias), atol=1e-5, rtol=1e-5)
    assert product.shape == (*shape[:-1], rows)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.ones(1, 2, 16), torch.ones(8, 16)),  # two rows
        (torch.ones(1, 16, dtype=torch.bfloat16), torch.ones(8, 16, dtype=torch.bfloat16)),
        (torch.ones(1, 16), torch.ones(16, 8).t()),  # stored by columns
        (torch.ones(1, 16), torch.ones(7, 16)),  # no block size divides it
    ],
)
def test_unsupported_inputs_are_left_to_torch(monkeypatch, x, weight):
    monkeypatch.setattr(rows_module.torch, "bmm", None)
    assert torch.equal(rows_module.linear(x, weight), F.linear(x, weight))


def test_one_row_is_multiplied_in_blocks(monkeypatch):
    called, bmm = [], torch.bmm
    monkeypatch.setattr(rows_module.torch, "bmm", lambda *args: called.append(args) or bmm(*args))
    rows_module.linear(torch.ones(1, 1, 16), torch.ones(8, 16))
    assert [tuple(matrix.shape) for matrix in called[0]] == [(4, 2, 16), (4, 16, 1)]


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch is built without MKL here")
def test_blocks_are_used_on_amd_only(monkeypatch, tmp_path):
    monkeypatch.undo()
    amd, intel = tmp_path / "amd", tmp_path / "intel"
    amd.write_text("vendor_id\t: AuthenticAMD\n")
    intel.write_text("vendor_id\t: GenuineIntel\n")
    assert [rows_module.in_blocks(file) for file in (amd, intel, tmp_path / "none")] == [True, False, False]


@pytest.mark.parametrize(("rows", "widened"), [(rows_module.MANY - 1, False), (rows_module.MANY, True)])
@pytest.mark.parametrize("biased", [False, True])
def test_many_bfloat16_rows_are_widened_without_onednn_support(rows, widened, biased, monkeypatch):
    monkeypatch.setattr(rows_module, "_has_bfloat16", lambda: False)
    rng = torch.Generator().manual_seed(rows)
    x, weight = torch.randn((1, rows, 48), generator=rng).bfloat16(), torch.randn((8, 48), generator=rng).bfloat16()
    bias = torch.randn(8, generator=rng).bfloat16() if biased else None
    called, plain = [], F.linear
    monkeypatch.setattr(rows_module.F, "linear", lambda *args: called.append(args[1].dtype) or plain(*args))
    product = rows_module.linear(x, weight, bias)
    assert called == [torch.float32 if widened else torch.bfloat16]
    torch.testing.assert_close(product, plain(x, weight, bias))
    assert product.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "device", "by_onednn"),
    [(torch.bfloat16, "cpu", False), (torch.float32, "cpu", True), (torch.bfloat16, "cuda", True)],
)
def test_onednn_is_disabled_for_bfloat16_on_a_cpu_and_restored(dtype, device, by_onednn):
    before = torch.backends.mkldnn.enabled
    with rows_module.without_onednn(dtype, torch.device(device)):
        assert torch.backends.mkldnn.enabled == (before and by_onednn)
    assert torch.backends.mkldnn.enabled == before
