"""FP8 rounding against torch's own cast, for each kind of scale."""

import pytest
import torch

from narrowgauge.quant.formats.base import dequantize_weight
from narrowgauge.quant.formats.scheme import WeightScheme
from narrowgauge.quant.methods.base import SchemeRefused
from narrowgauge.quant.methods.fp8 import FP8

METHOD = FP8(name="fp8")


def _weights(columns: int = 192) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [scale * torch.randn(rows, columns, generator=generator) for rows, scale in ((48, 1.0), (16, 3.0))]


def test_a_row_is_divided_by_its_own_scale_and_cast():
    for weight, rounded in zip(
        _weights(), METHOD.round(_weights(), WeightScheme(bits=8, type="float"), None), strict=True
    ):
        scale = weight.abs().amax(1, keepdim=True) / 448
        assert torch.equal(rounded.weight.codes.float(), (weight / scale).to(torch.float8_e4m3fn).float())
        assert torch.equal(rounded.weight.scales, scale)


def test_with_one_scale_a_tensor_all_linears_of_the_set_have_it_in_common():
    weights = _weights()
    rounded = METHOD.round(weights, WeightScheme(bits=8, type="float", per_tensor=True), None)
    scale = torch.cat(weights).abs().max() / 448
    for weight, one in zip(weights, rounded, strict=True):
        assert torch.equal(one.weight.scales, scale.view(1, 1))
        assert torch.equal(one.weight.codes.float(), (weight / scale).to(torch.float8_e4m3fn).float())


def test_blocks_that_the_shape_does_not_fill_keep_their_own_scale():
    weight = torch.randn(576, 448, generator=torch.Generator().manual_seed(7))
    rounded = METHOD.round([weight], WeightScheme(bits=8, type="float", block=(128, 128)), None)[0].weight
    assert rounded.scales.shape == (5, 4)
    assert rounded.codes.shape == weight.shape
    assert float(rounded.scales[4, 3]) == pytest.approx(float(weight[512:, 384:].abs().max()) / 448)
    error = dequantize_weight(rounded, torch.float32) - weight
    assert float(error.norm() / weight.norm()) == pytest.approx(0.0267, rel=0.03)


def test_ints_are_refused_with_what_to_write_instead():
    scheme = WeightScheme(bits=4, group=32)
    assert METHOD.refusal(WeightScheme(bits=8, type="float")) is None
    with pytest.raises(SchemeRefused, match="fp8 rounds to floats, not to 4-bit ints; set type: float") as caught:
        METHOD.round(_weights(), scheme, None)
    assert METHOD.refusal(scheme) == str(caught.value)
