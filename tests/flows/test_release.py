"""A release ends registered with its figures; what the gate rejects never becomes candidate."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from narrowgauge.flows.evaluate import HeldOutText
from narrowgauge.flows.progress import Quiet
from narrowgauge.flows.release import ReleaseRequest
from narrowgauge.flows.runs import run_release
from narrowgauge.flows.settings import FlowSettings, read_flow_settings
from narrowgauge.quant.evaluate.report import EvalReport
from narrowgauge.quant.recipe import Recipe
from narrowgauge.serving import artifacts
from narrowgauge.serving.registry import Registry

TEXT = HeldOutText(windows=2, length=64)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_api: str) -> FlowSettings:
    """Tasks read their settings from the environment, as they would on another machine."""
    for name in (
        "NG_ARTIFACT_ROOT",
        "NG_STORE_URL",
        "NG_MLFLOW_TRACKING_URI",
        "MLFLOW_TRACKING_URI",
        "PREFECT_API_URL",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NG_HOME", str(tmp_path / "ng"))
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    return read_flow_settings()


@pytest.mark.parametrize("prefect", [False, True], ids=["plain", "prefect"])
def test_a_passing_release_becomes_candidate_with_its_figures_and_files(
    settings: FlowSettings, make_recipe: Callable[..., Recipe], prefect: bool
) -> None:
    recipe = make_recipe(bits=8, gate="{perplexity_ratio_max: 1.5, top1_min: 0.5}", method="{name: gptq}")
    outcome = run_release(ReleaseRequest(recipe=recipe, text=TEXT), settings=settings, watch=Quiet(), prefect=prefect)
    registry = Registry(settings.shared.mlflow_tracking_uri, home=settings.shared.home)
    candidate = registry.by_alias("tiny", "candidate")
    assert outcome.exit_code == 0
    assert candidate == outcome.version
    assert (candidate.digest, candidate.verdict, candidate.scheme) == (outcome.checkpoint.digest, "passed", "W8A16")
    assert artifacts.fetch("models:/tiny@candidate", settings=settings.shared).digest == candidate.digest
    figures = registry.metrics(candidate)
    assert figures["perplexity"] == outcome.judgement.report.perplexity
    assert {"kl_mean", "top1", "size_bytes", "base_size_bytes", "quantize_s"} <= figures.keys()
    files = {path.name: path for path in (settings.shared.home / "mlflow" / "artifacts").rglob("*") if path.is_file()}
    assert {"report.json", "report.md", "manifest.json", "layers.json"} <= files.keys()
    assert EvalReport.from_json(files["report.json"].read_text()) == outcome.judgement.report


@pytest.mark.parametrize("prefect", [False, True], ids=["plain", "prefect"])
def test_a_rejected_release_is_registered_with_exit_code_3_and_is_no_candidate(
    settings: FlowSettings, make_recipe: Callable[..., Recipe], prefect: bool
) -> None:
    recipe = make_recipe(bits=2, gate="{kl_mean_max: 0.0}")
    outcome = run_release(ReleaseRequest(recipe=recipe, text=TEXT), settings=settings, watch=Quiet(), prefect=prefect)
    registry = Registry(settings.shared.mlflow_tracking_uri, home=settings.shared.home)
    assert outcome.exit_code == 3
    assert outcome.version.verdict == "rejected"
    assert outcome.judgement.reasons[0].startswith("KL mean")
    assert registry.by_alias("tiny", "candidate") is None
    assert [version.digest for version in registry.versions("tiny")] == [outcome.checkpoint.digest]


def test_an_error_of_a_step_comes_out_of_the_flow_as_it_is(
    settings: FlowSettings, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    from narrowgauge.quant.recipe import RecipeError

    (tmp_path / "recipe.yaml").unlink(missing_ok=True)
    recipe = make_recipe()
    impossible = ReleaseRequest.from_mapping(
        {
            **ReleaseRequest(recipe=recipe, text=TEXT).to_mapping(),
            "recipe": {
                **ReleaseRequest(recipe=recipe).to_mapping()["recipe"],
                "scheme": {"weights": {"bits": 4, "group": 48}},
            },
        }
    )
    with pytest.raises(RecipeError, match="not a multiple of group"):
        run_release(impossible, settings=settings, watch=Quiet(), prefect=True)


def test_a_request_survives_its_mapping(make_recipe: Callable[..., Recipe]) -> None:
    request = ReleaseRequest(recipe=make_recipe(), override="because", text=TEXT)
    assert ReleaseRequest.from_mapping(request.to_mapping()) == request


def test_without_prefect_nothing_of_it_is_imported() -> None:
    program = "import sys, narrowgauge.flows.runs, narrowgauge.flows.demo; sys.exit('prefect' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
