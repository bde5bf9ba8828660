"""Round to nearest as a method: each code is the nearest of all codes, by trying every one."""

import torch

from narrowgauge.quant.formats.scheme import WeightScheme
from narrowgauge.quant.methods.rtn import RTN


def test_every_code_is_the_nearest_of_all_codes():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(4))
    scheme = WeightScheme(bits=4, group=32)
    quantized = RTN(name="rtn").round([weight], scheme, None)[0].weight
    scales = quantized.scales.repeat_interleave(32, dim=1)
    candidates = torch.arange(-8, 8).view(1, 1, -1) * scales.unsqueeze(-1)
    best = (weight.unsqueeze(-1) - candidates).abs().amin(-1)
    torch.testing.assert_close((weight - quantized.codes * scales).abs(), best)


def test_stacked_weights_are_rounded_each_on_its_own():
    first, second = torch.randn(4, 32), torch.randn(8, 32)
    method, scheme = RTN(name="rtn"), WeightScheme(bits=4)
    together = method.round([first, second], scheme, None)
    assert [len(one.weight.codes) for one in together] == [4, 8]
    assert torch.equal(together[1].weight.codes, method.round([second], scheme, None)[0].weight.codes)
    assert not method.needs
