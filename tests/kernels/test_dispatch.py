"""Which kernels are chosen, and that every name in the tables exists twice."""

import importlib

import pytest
import torch

from narrowgauge.kernels.dispatch import REFERENCE, TRITON, KernelError, select_kernels

CPU = torch.device("cpu")


def test_every_kernel_has_a_twin() -> None:
    assert set(TRITON) <= set(REFERENCE)
    for name, file in REFERENCE.items():
        assert callable(getattr(importlib.import_module(f"narrowgauge.kernels.reference.{file}"), name))


def test_a_cpu_runs_the_twins() -> None:
    assert set(select_kernels(CPU).origins.values()) == {"reference"}


def test_triton_on_a_cpu_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowgauge.kernels.dispatch.triton_unavailable", lambda device: "no such luck")
    with pytest.raises(KernelError, match="no such luck; use --kernels auto"):
        select_kernels(CPU, "triton")
