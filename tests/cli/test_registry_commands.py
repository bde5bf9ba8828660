"""register, list, show and release as a user meets them: tables, JSON, exit codes, one-line errors."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from narrowgauge.cli import registry, release
from narrowgauge.quant.evaluate.report import Conventions, EvalReport, Subject
from narrowgauge.quant.formats.manifest import Base, write_manifest
from narrowgauge.serving.registry import RegistryError

runner = CliRunner()


def app() -> typer.Typer:
    assembled = typer.Typer()
    assembled.command("register")(registry.register)
    assembled.command("list")(registry.list_models)
    assembled.command("show")(registry.show)
    assembled.command("release")(release.release)
    return assembled


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NG_ARTIFACT_ROOT", "NG_MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NG_HOME", str(tmp_path / "ng"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    write_manifest(folder, base=Base(source="test"), recipe_digest="r" * 64)
    return folder


def report_about(digest: str, path: Path) -> Path:
    conventions = Conventions(
        dataset=("pydoc",), split="heldout", join=" ", bos="none", window=8, stride=8,
        windows=1, tokens=7, batch=1, dtype="float32", attention="sdpa",
    )  # fmt: skip
    report = EvalReport(
        source="reference",
        candidate=Subject(name="c", digest=digest, scheme="W4A16"),
        base=None,
        conventions=conventions,
        perplexity=20.0,
        kl_mean=0.5,
        seconds=1.0,
    )
    path.write_text(report.to_json())
    return path


def recipe_with(gate: str, path: Path) -> Path:
    path.write_text(
        "version: 1\nmodel: {source: x, name: m}\nmethods: [{name: rtn}]\nscheme: {weights: {bits: 4}}\n"
        + f"gate: {gate}\n"
    )
    return path


def test_an_empty_registry_says_how_to_fill_it() -> None:
    result = runner.invoke(app(), ["list"])
    assert result.exit_code == 0
    assert "narrowgauge register" in result.output
    assert json.loads(runner.invoke(app(), ["list", "--json"]).output) == {}


def test_a_registered_checkpoint_is_listed_and_shown(checkpoint: Path) -> None:
    made = json.loads(runner.invoke(app(), ["register", str(checkpoint), "--name", "m", "--json"]).output)
    assert (made["version"], made["verdict"], made["aliases"]) == (1, "unjudged", [])
    assert made["uri"].endswith(f"artifacts/checkpoints/{made['digest']}")
    listed = json.loads(runner.invoke(app(), ["list", "--json"]).output)
    assert [version["digest"] for version in listed["m"]] == [made["digest"]]
    shown = json.loads(runner.invoke(app(), ["show", "m/1", "--json"]).output)
    assert shown["tags"]["narrowgauge.recipe_digest"] == "r" * 64
    assert made["digest"][:12] in runner.invoke(app(), ["show", "m"], env={"COLUMNS": "160"}).output


@pytest.mark.parametrize(
    ("gate", "code", "aliases"), [("{kl_mean_max: 1.0}", 0, ["candidate"]), ("{kl_mean_max: 0.1}", 3, [])]
)
def test_the_recipes_gate_gives_the_verdict_on_the_report(
    checkpoint: Path, tmp_path: Path, gate: str, code: int, aliases: list[str]
) -> None:
    from narrowgauge.quant.formats.manifest import read_manifest

    report = report_about(read_manifest(checkpoint).digest, tmp_path / "report.json")
    recipe = recipe_with(gate, tmp_path / "recipe.yaml")
    arguments = ["register", str(checkpoint), "--name", "m", "--report", str(report), "--recipe", str(recipe), "--json"]
    result = runner.invoke(app(), arguments)
    assert result.exit_code == code
    assert json.loads(result.output)["aliases"] == aliases
    assert json.loads(runner.invoke(app(), ["show", "m/1", "--json"]).output)["metrics"]["kl_mean"] == 0.5


def test_a_report_about_other_bytes_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    report = report_about("0" * 64, tmp_path / "report.json")
    result = runner.invoke(app(), ["register", str(checkpoint), "--name", "m", "--report", str(report)])
    assert "the report judges 000000000000" in str(result.exception)


def test_an_unknown_model_is_one_line() -> None:
    result = runner.invoke(app(), ["show", "nobody"])
    assert isinstance(result.exception, RegistryError)
    assert "no model 'nobody'" in str(result.exception)


def test_a_release_with_a_rollout_and_no_controller_fails_before_the_work(tmp_path: Path) -> None:
    from narrowgauge.flows.demo import GOOD_RECIPE, GOOD_SPEC

    result = runner.invoke(app(), ["release", str(GOOD_RECIPE), "--rollout", str(GOOD_SPEC), "--no-prefect"])
    assert "no controller answers" in str(result.exception)
    assert not (tmp_path / "ng" / "work").exists()
