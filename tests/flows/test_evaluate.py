"""Judging a checkpoint in a flow: with its rounding, with what was noted in its making, and only once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from narrowgauge.flows.evaluate import HeldOutText, Judgement, evaluate_checkpoint
from narrowgauge.flows.quantize import QuantizedCheckpoint, quantize_recipe
from narrowgauge.quant.evaluate import reference
from narrowgauge.quant.recipe import Recipe, load_recipe
from narrowgauge.serving.settings import Settings, read_settings

TEXT = HeldOutText(windows=3, length=48)
RECIPE = """
version: 1
model: {{source: "{model}", name: tiny}}
calibration: {{sources: [{{text: pydoc}}], samples: 4, length: 64, seed: 7}}
methods: [{{name: gptq}}]
scheme: {{weights: {{bits: 8, type: int}}, activations: {{bits: 8, type: int}}}}
gate: {{perplexity_ratio_max: {limit}}}
"""


class Lines:
    """A Watch that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, what: str, done: int, total: int) -> None:
        pass


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return read_settings({"NG_HOME": str(tmp_path / "home")})


@pytest.fixture
def judged(tiny_llama: Path, tmp_path: Path, settings: Settings) -> Callable[[float], Judgement]:
    """Quantizes the tiny model to W8A8 and judges it with a limit on the perplexity ratio."""

    def judge(limit: float) -> Judgement:
        path = tmp_path / "recipe.yaml"
        path.write_text(RECIPE.format(model=tiny_llama, limit=limit))
        recipe: Recipe = load_recipe(path)
        checkpoint: QuantizedCheckpoint = quantize_recipe(recipe, settings=settings, watch=Lines())
        return evaluate_checkpoint(checkpoint, recipe, TEXT, settings=settings, watch=Lines())

    return judge


def test_the_report_tells_of_the_rounding_the_layers_and_the_calibration(judged: Callable[[float], Judgement]) -> None:
    judgement = judged(1.1)
    report = judgement.report
    assert judgement.passed
    assert report.conventions.rounding == "inputs of 14 Linears (W8A8)"
    assert report.conventions.revisions[0].startswith("Python 3")
    assert report.candidate.calibration_seed == 7
    assert {layer.scheme for layer in report.layers} == {"W8A8"}
    assert sum(report.kl_histogram.counts) == report.tokens  # type: ignore[union-attr]


def test_a_broken_candidate_is_rejected_whatever_the_limit(
    judged: Callable[[float], Judgement], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = reference.ReferenceModel.logits

    def broken(self: reference.ReferenceModel, ids: torch.Tensor) -> torch.Tensor:
        logits = real(self, ids)
        return logits.masked_fill(torch.tensor(self.rounding is not None), float("nan"))

    monkeypatch.setattr(reference.ReferenceModel, "logits", broken)
    judgement = judged(1e9)
    assert not judgement.passed
    assert "perplexity is not finite" in judgement.reasons
    assert "KL mean is not finite" in judgement.reasons
