"""`narrowgauge evaluate`: what people and programs get from it, and one clear line for each mistake."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from narrowgauge.cli.main import make_app
from narrowgauge.quant.evaluate.report import EvalReport
from narrowgauge.quant.evaluate.windows import EvaluationError


@pytest.fixture
def novel(tmp_path):
    path = tmp_path / "novel.jsonl"
    path.write_text("".join(f'{{"text": "Chapter {i}: it was a dark and stormy night."}}\n' for i in range(100)))
    return path


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    monkeypatch.setenv("NG_HOME", str(tmp_path / "home"))


def _evaluate(*arguments):
    return CliRunner().invoke(make_app(), ["evaluate", *map(str, arguments)], catch_exceptions=False)


def _stderr_of(*arguments):
    command = [sys.executable, "-m", "narrowgauge", "evaluate", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.returncode, result.stderr


@pytest.mark.parametrize("via", ["reference", "engine"])
def test_a_model_against_itself_is_measured_by_either_source(tiny_llama, novel, via):
    folder = tiny_llama()
    arguments = ("--against", folder, "--text", novel, "--windows", 2, "--length", 32, "--with", via, "--json")
    result = _evaluate(folder, *arguments)
    assert result.exit_code == 0, result.output
    report = EvalReport.from_json(result.stdout)
    assert report.source == via
    assert (report.kl_mean, report.top1, report.perplexity_ratio) == (0, 1, 1)
    assert report.candidate.name == str(folder)
    assert report.tokens == 62


def test_engine_and_reference_agree_on_the_perplexity(tiny_llama, novel):
    folder = tiny_llama()
    figures = []
    for via in ("reference", "engine"):
        result = _evaluate(folder, "--text", novel, "--windows", 2, "--length", 48, "--with", via, "--json")
        figures.append(json.loads(result.stdout)["perplexity"])
    assert figures[1] == pytest.approx(figures[0], rel=0.01)


def test_the_report_is_written_for_programs_and_for_people(tiny_llama, novel, tmp_path):
    out = tmp_path / "out"
    result = _evaluate(
        tiny_llama(), "--text", novel, "--windows", 1, "--length", 16, "--output", out, "--note", "a remark"
    )
    assert result.exit_code == 0, result.output
    report = EvalReport.from_json((out / "report.json").read_text(encoding="utf-8"))
    assert report.notes == ("a remark",)
    assert "a remark" in (out / "report.md").read_text(encoding="utf-8")
    assert "perplexity" in result.stdout
    assert "15 tokens" in result.stdout


def test_a_missing_folder_is_one_line(tmp_path):
    code, text = _stderr_of(tmp_path / "none")
    assert code == 1
    assert text == f"error: {tmp_path / 'none'}: no such folder\n"


def test_a_missing_text_is_one_line(tiny_llama, tmp_path):
    code, text = _stderr_of(tiny_llama(), "--text", tmp_path / "none.txt")
    assert code == 1
    assert text == f"error: {tmp_path / 'none.txt'}: no such file\n"


def test_windows_longer_than_the_context_are_one_line(tiny_llama, novel):
    code, text = _stderr_of(tiny_llama(max_position_embeddings=32), "--text", novel, "--windows", 1, "--length", 64)
    assert code == 1
    last = text.splitlines()[-1]  # the dataset library tells of its progress before
    assert last.startswith("error: windows of 64 tokens are longer than the model's 32 positions")
    assert "Traceback" not in text


@pytest.mark.parametrize(
    "arguments",
    [("--windows", "-1"), ("--length", "1"), ("--with", "magic"), ("--bos", "two"), ("--layers", "2")],
)
def test_a_wrong_option_is_a_usage_error(arguments):
    result = CliRunner().invoke(make_app(), ["evaluate", "folder", *arguments])
    assert result.exit_code == 2
    assert arguments[0] in result.output


def test_options_of_the_reference_are_not_ignored_by_the_engine():
    result = CliRunner().invoke(make_app(), ["evaluate", "folder", "--with", "engine", "--no-round-kv"])
    assert result.exit_code == 2
    assert "--no-round-kv: only with --with reference" in result.output


def test_everything_is_measured_in_one_go_and_set_beside_another_report(tiny_llama, quantized, novel, tmp_path):
    base = tiny_llama()
    common = ("--against", base, "--text", novel, "--windows", 3, "--length", 32, "--stride", 16, "--json")
    coarse, fine = quantized(base, "{weights: {bits: 4, group: 32}}"), quantized(base, "{weights: {bits: 8}}")
    assert _evaluate(coarse, *common, "--output", tmp_path / "w4").exit_code == 0
    w4 = tmp_path / "w4" / "report.json"
    result = _evaluate(fine, *common, "--layers", 2, "--compare", w4, "--output", tmp_path / "w8")
    assert result.exit_code == 0, result.output
    report = EvalReport.from_json(result.stdout)
    assert (report.conventions.stride, report.tokens) == (16, 31 + 16 + 16)
    assert len(report.layers) == 14
    assert all(layer.propagated_error is not None for layer in report.layers)
    assert len(report.attention) == 2
    page = (tmp_path / "w8" / "report.html").read_text(encoding="utf-8")
    assert "W4A16 (quantized-0)" in page
    assert "W8A16 (quantized-1)" in page


def test_without_lm_eval_tasks_are_one_line_with_the_command_that_helps(tiny_llama, novel, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(EvaluationError, match=r"run: pip install 'narrowgauge\[lm-eval\]'$"):
        _evaluate(tiny_llama(), "--text", novel, "--tasks", "arc_easy")
