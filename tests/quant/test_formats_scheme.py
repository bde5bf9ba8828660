"""Schemes refuse what cannot be; a width that the group does not divide is answered with advice."""

import pytest

from narrowgauge.quant.formats.scheme import ActivationScheme, KVCacheScheme, Scheme, WeightScheme, check_group


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 1}, "2 to 8 bits"),
        ({"bits": 16}, "2 to 8 bits"),
        ({"bits": 4, "type": "float"}, "8 bits"),
        ({"bits": 4, "group": 0}, "positive number of columns"),
        ({"bits": 8, "type": "float", "symmetric": False}, "always symmetric"),
    ],
)
def test_a_weight_scheme_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        WeightScheme(**arguments)


def test_activation_and_cache_schemes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="only be found at run time"):
        ActivationScheme(bits=8, type="int", granularity="token", dynamic=False)
    with pytest.raises(ValueError, match="8 bits"):
        ActivationScheme(bits=4, type="int")
    with pytest.raises(ValueError, match="8 bits"):
        KVCacheScheme(bits=4, type="int")


@pytest.mark.parametrize(("bits", "low", "high"), [(2, -2, 1), (4, -8, 7), (8, -128, 127)])
def test_codes_span_twos_complement(bits, low, high):
    scheme = WeightScheme(bits=bits)
    assert (scheme.qmin, scheme.qmax) == (low, high)


def test_the_short_name_is_the_fields():
    assert Scheme(weights=WeightScheme(bits=4, group=64)).name == "W4A16"
    assert Scheme(weights=WeightScheme(bits=4, symmetric=False)).name == "W4A16-asym"
    w8a8 = Scheme(weights=WeightScheme(bits=8), activations=ActivationScheme(bits=8, type="int"))
    assert w8a8.name == "W8A8"


def test_a_width_that_the_group_does_not_divide_is_answered_with_what_would_do():
    mismatch = check_group("model.layers.3.mlp.down_proj", 448, WeightScheme(bits=4, group=128))
    assert "in_features 448 is not a multiple of group 128; use 64 or 32 or 16, or keep the layer" in str(mismatch)
    assert check_group("x", 448, WeightScheme(bits=4, group=64)) is None
    assert check_group("x", 449, WeightScheme(bits=4, group=None)) is None
