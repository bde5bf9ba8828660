"""Sums over inputs against the same sums in double precision."""

import pytest
import torch

from narrowgauge.quant.model.inputs import InputsNotFinite, InputSums

CPU = torch.device("cpu")


def _x(tokens: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(columns)
    return (torch.randn(tokens, columns, generator=generator) * torch.linspace(0.1, 3, columns) + 0.5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 255, 256, 257, 576])
def test_hessians_hold_fp32_sums_whatever_the_inputs_dtype(columns, dtype):
    """Also of bfloat16 inputs: their products are exact, so no digit is lost to their dtype."""
    sums = InputSums(columns, CPU, {"hessian", "heldout"})
    batches, heldout = _x(900, columns, dtype).split(300), _x(200, columns, dtype)
    for batch in batches:
        sums.add(batch, heldout=False)
    sums.add(heldout, heldout=True)
    result = sums.statistics("layer")
    for hessian, x in ((result.hessian, torch.cat(batches)), (result.heldout, heldout)):
        exact = x.double().t() @ x.double()
        assert float((hessian.double() - exact).norm() / exact.norm()) < 3e-6
        assert torch.equal(hessian, hessian.t())
    assert result.tokens == 900
    everything = torch.cat([*batches, heldout]).float()
    assert torch.equal(result.absmax, everything.abs().amax(0))
    torch.testing.assert_close(result.absmean, torch.cat(batches).float().abs().mean(0), rtol=1e-5, atol=1e-6)


def test_multiplication_elsewhere_keeps_its_precision():
    """The switch that speeds bfloat16 sums up is put back."""
    sums = InputSums(64, CPU, {"hessian"})
    sums.add(_x(64, 64, torch.bfloat16), heldout=False)
    one, other = _x(64, 64, torch.float32), _x(64, 64, torch.float32).t()
    exact = one.double() @ other.double()
    assert float(((one @ other).double() - exact).norm() / exact.norm()) < 1e-6


def test_what_is_not_needed_is_not_kept():
    sums = InputSums(8, CPU, {"range"})
    sums.add(_x(5, 8, torch.float32), heldout=False)
    result = sums.statistics("layer")
    assert result.hessian is None
    assert result.heldout is None
    assert result.tokens == 5


def test_statistics_may_be_read_and_added_to_again():
    sums = InputSums(300, CPU, {"hessian"})
    x = _x(20, 300, torch.float32)
    sums.add(x, heldout=False)
    first = sums.statistics("layer").hessian.clone()
    sums.add(x, heldout=False)
    torch.testing.assert_close(sums.statistics("layer").hessian, 2 * first)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("heldout", [False, True])
def test_one_value_that_is_not_finite_is_noticed(bad, heldout):
    sums = InputSums(8, CPU, {"hessian"})
    x = _x(5, 8, torch.bfloat16)
    x[3, 2] = bad
    sums.add(x, heldout=heldout)
    sums.add(_x(5, 8, torch.bfloat16), heldout=False)
    with pytest.raises(InputsNotFinite, match=r"^model\.layers\.3\.mlp\.down_proj: NaN or infinity reaches it"):
        sums.statistics("model.layers.3.mlp.down_proj")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_sums_as_exactly(dtype):
    cuda, x = torch.device("cuda"), _x(3000, 2500, dtype)
    sums = InputSums(2500, cuda, {"hessian"})
    for batch in x.split(1000):
        sums.add(batch.to(cuda), heldout=False)
    hessian = sums.statistics("layer").hessian
    exact = x.double().t() @ x.double()
    assert torch.equal(hessian, hessian.t())
    # Tensor cores add up in fp32, but in an order of their own and without its last bits.
    assert float((hessian.cpu().double() - exact).norm() / exact.norm()) < 1e-4
