"""Round to nearest as a method: each code is the nearest of all codes, by trying every one."""

import pytest
import torch

from narrowgauge.quant.formats.base import dequantize_weight
from narrowgauge.quant.formats.scheme import WeightScheme
from narrowgauge.quant.methods.rtn import RTN
from narrowgauge.quant.observers import WeightNotFinite

W4 = WeightScheme(bits=4, group=32)


def _weight(rows: int, columns: int, seed: int = 4) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_every_code_is_the_nearest_of_all_codes():
    weight = _weight(8, 64)
    quantized = RTN(name="rtn").round([weight], W4, None)[0].weight
    scales = quantized.scales.repeat_interleave(32, dim=1)
    candidates = torch.arange(-8, 8).view(1, 1, -1) * scales.unsqueeze(-1)
    best = (weight.unsqueeze(-1) - candidates).abs().amin(-1)
    torch.testing.assert_close((weight - quantized.codes * scales).abs(), best)


def test_every_float_is_the_nearest_of_all_floats():
    weight = _weight(8, 64)
    quantized = RTN(name="rtn").round([weight], WeightScheme(bits=8, type="float"), None)[0].weight
    floats = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    candidates = floats[torch.isfinite(floats)].view(1, 1, -1) * quantized.scales.unsqueeze(-1)
    best = (weight.unsqueeze(-1) - candidates).abs().amin(-1)
    ours = (weight - quantized.codes.float() * quantized.scales).abs()
    torch.testing.assert_close(ours, best, rtol=1e-5, atol=1e-7)


def test_weights_of_one_set_are_rounded_each_on_its_own():
    first, second = _weight(4, 32), _weight(8, 32, seed=5)
    method, scheme = RTN(name="rtn"), WeightScheme(bits=4)
    together = method.round([first, second], scheme, None)
    assert [len(one.weight.codes) for one in together] == [4, 8]
    assert torch.equal(together[1].weight.codes, method.round([second], scheme, None)[0].weight.codes)
    assert not method.needs


def test_the_search_loses_less_and_limits_are_kept():
    weight = _weight(64, 128)

    def lost(**options):
        rounded = RTN(name="rtn", **options).round([weight], W4, None)[0].weight
        return float((dequantize_weight(rounded, torch.float32) - weight).abs().pow(2.4).sum())

    assert lost(search="mse") < 0.97 * lost()
    limit = torch.full((64, 4), 0.75)
    limited = RTN(name="rtn").round([weight], W4, None, limits=[limit])[0].weight
    torch.testing.assert_close(limited.scales, limit / 7.5)


def test_a_weight_with_nan_is_refused():
    weight = _weight(4, 32)
    weight[1, 2] = float("nan")
    with pytest.raises(WeightNotFinite):
        RTN(name="rtn").round([weight], W4, None)
