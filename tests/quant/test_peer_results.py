"""The results that are committed keep the limits that infra/bench/limits.py states; nothing is measured here."""

import copy
import json
import runpy
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "infra" / "bench"
broken = runpy.run_path(str(BENCH / "limits.py"))["broken"]
COMMITTED = [
    path
    for topic in ("quant", "agreement", "quantize", "vllm")
    for path in sorted((BENCH / "results").glob(f"{topic}-*"))
]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_results_keep_every_limit(path):
    assert broken(json.loads(path.read_text(encoding="utf-8"))) == []


def _row(name, ours, peer=None, *, unit="perplexity", ratio=None):
    return {"name": name, "unit": unit, "ours": ours, "peer": peer, "peer_name": "peer 1.0", "ratio": ratio}


def _quality():
    """Figures that keep every limit, by row; both texts alike."""
    figures = {
        "bf16": (20.0, None),
        "rtn_w4g64": (30.0, None),
        "gptq_w4g64": (25.0, 25.0),
        "awq_w4g64": (28.0, 27.0),
        "awq_gptq_w4g64": (24.0, None),
        "smoothquant_gptq_w8a8": (20.1, 20.1),
        "gptq_fp8_dynamic": (20.1, 20.1),
    }
    rows = [_row(f"{case}/{text}_ppl", *pair) for case, pair in figures.items() for text in ("austen", "handbook")]
    for text in ("austen", "handbook"):
        rows.append(_row(f"gptq_w4g64/{text}_ppl_gptqmodel", 25.0, 25.0))
        rows += [
            _row(f"{case}/{text}_ppl_inputs_unrounded", 20.05) for case in ("smoothquant_gptq_w8a8", "gptq_fp8_dynamic")
        ]
    return {"topic": "quant", "rows": rows}


def test_results_that_keep_every_limit_are_let_through():
    assert broken(_quality()) == []


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("gptq_w4g64/austen_ppl", 25.06, "peer 1.0"),
        ("gptq_w4g64/handbook_ppl_gptqmodel", 25.06, "peer 1.0"),
        ("awq_w4g64/austen_ppl", 30.01, "rtn_w4g64"),
        ("awq_gptq_w4g64/handbook_ppl", 25.01, "gptq_w4g64"),
        ("smoothquant_gptq_w8a8/austen_ppl", 20.21, "the base"),
        ("gptq_fp8_dynamic/austen_ppl_inputs_unrounded", 20.1, "not done"),
    ],
)
def test_a_figure_beyond_its_limit_is_named(name, value, told):
    result = copy.deepcopy(_quality())
    next(row for row in result["rows"] if row["name"] == name)["ours"] = value
    found = broken(result)
    assert len(found) == 1
    assert told in found[0]


@pytest.mark.parametrize(
    ("topic", "good", "bad"),
    [
        ("agreement", _row("w8a8/austen_ppl", 20.03, 20.0), _row("w8a8/austen_ppl", 20.05, 20.0)),
        (
            "quantize",
            _row("gptq_w4g64/64x512_llmcompressor", 50.0, 101.0, unit="s", ratio=2.02),
            _row("gptq_w4g64/64x512_llmcompressor", 50.0, 99.0, unit="s", ratio=1.98),
        ),
        (
            "vllm",
            _row("gptq_w4g64/same_answers", 8.0, unit="of 8"),
            _row("gptq_w4g64/same_answers", 7.0, unit="of 8"),
        ),
    ],
)
def test_each_topic_has_a_limit_of_its_own(topic, good, bad):
    assert broken({"topic": topic, "rows": [good]}) == []
    (found,) = broken({"topic": topic, "rows": [bad]})
    assert bad["name"] in found
