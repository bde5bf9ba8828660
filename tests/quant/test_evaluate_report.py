"""EvalReport: read back as it was written, refused where it was tampered with, and readable by people."""

import dataclasses
import json

import pytest

from narrowgauge.quant.evaluate.report import Conventions, EvalReport, LayerError, Subject
from narrowgauge.quant.formats.read import ReadError

REPORT = EvalReport(
    source="engine",
    candidate=Subject(name="pypi:x==1", digest="ab" * 32, scheme="W4A16", size_bytes=100_000_000),
    base=Subject(name="base", size_bytes=250_000_000),
    conventions=Conventions(
        dataset=("pydoc", "novels.txt"),
        split="heldout",
        join="\n\n",
        bos="<s> in each window",
        window=512,
        stride=512,
        windows=8,
        tokens=4088,
        batch=2,
        dtype="bfloat16",
        attention="paged",
        base_dtype="float32",
        base_attention="sdpa",
        versions={"torch": "2.13.0"},
    ),
    perplexity=25.125,
    base_perplexity=20.5,
    perplexity_ratio=25.125 / 20.5,
    kl_mean=0.1,
    kl_median=0.01,
    kl_p99=1.5,
    kl_max=7.25,
    top1=0.875,
    delta_p_rms=0.0625,
    layers=(
        LayerError(name="model.layers.0.mlp.up_proj", weight_error=0.11, output_error=0.05),
        LayerError(name="model.layers.1.mlp.up_proj", weight_error=0.12),
    ),
    notes=("the base model's weights were 4-bit once",),
    seconds=12.5,
)


def test_a_report_is_read_back_as_it_was_written():
    assert EvalReport.from_json(REPORT.to_json()) == REPORT


def test_a_report_of_one_model_alone_is_read_back():
    alone = EvalReport(
        source="reference",
        candidate=REPORT.candidate,
        base=None,
        conventions=REPORT.conventions,
        perplexity=3.5,
        seconds=1.0,
    )
    assert EvalReport.from_json(alone.to_json()) == alone
    assert alone.figures() == {"perplexity": 3.5}


def test_files_hold_the_same_report(tmp_path):
    json_path, markdown_path, _ = REPORT.write(tmp_path / "new" / "folder")
    assert EvalReport.from_json(json_path.read_text(encoding="utf-8")) == REPORT
    assert markdown_path.read_text(encoding="utf-8") == REPORT.to_markdown()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"perplexty": 1.0}, "did you mean 'perplexity'"),
        ({"kl_mean": "0.1"}, "kl_mean"),
        ({"schema": 3}, "schema 1 and 2, not 3"),
        ({"conventions": {}}, "conventions.dataset: is missing"),
    ],
)
def test_a_changed_report_is_refused_with_the_key(change, message):
    text = json.dumps({**json.loads(REPORT.to_json()), **change})
    with pytest.raises(ReadError, match=message):
        EvalReport.from_json(text, source="report.json")


def test_what_is_not_json_is_refused_with_its_file():
    with pytest.raises(ReadError, match=r"report\.json: is not JSON"):
        EvalReport.from_json("{", source="report.json")


def test_the_page_for_people_holds_figures_conventions_layers_and_notes():
    page = REPORT.to_markdown()
    for part in (
        "pypi:x==1",
        "W4A16",
        "digest abababababab",
        "40.0% of the base's",
        "| perplexity | 25.12 |",
        "| top-1 agreement | 87.50% |",
        "pydoc, novels.txt; split: heldout",
        "8 windows of 512 tokens, stride 512",
        "4088 scored tokens",
        "<s> in each window",
        "bfloat16, paged attention; base: float32, sdpa attention",
        "torch 2.13.0",
        "narrowgauge's engine",
        "- the base model's weights were 4-bit once",
    ):
        assert part in page, part
    assert page.index("layers.1.mlp") < page.index("layers.0.mlp"), "the worst layer comes first"


def test_a_figure_that_is_not_finite_is_named_on_the_page():
    broken = dataclasses.replace(REPORT, perplexity=None, non_finite=("perplexity",))
    assert "| perplexity | not finite |" in broken.to_markdown()
    assert EvalReport.from_json(broken.to_json()) == broken
