"""What is chosen for a processor follows from what it and torch can do."""

import pytest
import torch

from narrowgauge.kernels import hardware

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("capability", "flags", "expected"),
    [
        ("AVX512", {"avx512f", "avx512_bf16"}, torch.bfloat16),
        ("AVX512", {"avx512f", "amx_bf16"}, torch.bfloat16),
        ("AVX512", {"avx512f"}, torch.float32),
        ("AVX2", {"avx2"}, torch.float32),
        ("AVX2", {"avx512f", "avx512_bf16"}, torch.float32),
        ("AVX512", set(), torch.float32),
    ],
)
def test_bfloat16_is_chosen_only_where_it_is_multiplied_natively(monkeypatch, capability, flags, expected):
    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert hardware.resolve_dtype("auto", CPU) == expected
    assert hardware.resolve_dtype("float32", CPU) == torch.float32


@pytest.mark.parametrize(
    ("flags", "expected"), [({"avx2", "avx512f"}, "cpu-avx512"), ({"avx2"}, "cpu-avx2"), (set(), "cpu-")]
)
def test_results_are_filed_by_class_of_processor(monkeypatch, flags, expected):
    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset(flags))
    assert hardware.cpu_class().startswith(expected)


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="toaster"):
        hardware.resolve_device("toaster")
    assert hardware.resolve_device("cpu") == CPU
