"""The Triton kernels against their twins under Triton's interpreter, in a process of its own (it is chosen at import)."""

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("triton")

PROGRAM = """
import torch
from narrowgauge.kernels import rmsnorm, silu_mul
from narrowgauge.kernels.dispatch import select_kernels
from narrowgauge.kernels.reference import rmsnorm as rmsnorm_twin, silu_mul as silu_mul_twin

assert select_kernels(torch.device("cpu"), "triton").origins["silu_mul"] == "triton"
checked = 0
for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3)):  # the interpreter computes bfloat16 wrongly
    for width in (1, 15, 16, 17, 1023):
        for tokens in (0, 1, 3):
            torch.manual_seed(width)
            wide = torch.randn(tokens, 2 * width + 3, dtype=dtype)
            x, residual = wide[:, :width], torch.randn(tokens, width, dtype=dtype)
            weight, twin_residual = torch.rand(width, dtype=dtype) + 0.5, residual.clone()
            pairs = [
                (rmsnorm.rms_norm(x, weight, 1e-5), rmsnorm_twin.rms_norm(x, weight, 1e-5)),
                (rmsnorm.add_rms_norm(x, residual, weight, eps=1e-5), rmsnorm_twin.add_rms_norm(x, twin_residual, weight, eps=1e-5)),
                (residual, twin_residual),
                (silu_mul.silu_mul(wide[:, : 2 * width]), silu_mul_twin.silu_mul(wide[:, : 2 * width])),
            ]
            for answer, twin in pairs:
                assert answer.dtype == dtype
                torch.testing.assert_close(answer, twin, atol=tolerance, rtol=tolerance)
                checked += 1
print("checked", checked)
"""


def test_triton_kernels_agree_with_their_twins_on_awkward_shapes() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == ["checked", "120"]
