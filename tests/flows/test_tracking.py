"""What a release leaves in a run can be read back: every leaf of the recipe, every finite figure."""

from collections.abc import Callable

from narrowgauge.flows.tracking import layer_table, recipe_params, report_metrics, report_texts
from narrowgauge.quant.evaluate.report import Conventions, EvalReport, LayerError, Subject
from narrowgauge.quant.recipe import Recipe


def report(**changes: object) -> EvalReport:
    conventions = Conventions(
        dataset=("pydoc",),
        split="heldout",
        join="\n\n",
        bos="none",
        window=8,
        stride=8,
        windows=2,
        tokens=14,
        batch=1,
        dtype="float32",
        attention="sdpa",
    )
    fields: dict[str, object] = {
        "source": "reference",
        "candidate": Subject(name="c", size_bytes=10),
        "base": Subject(name="b", size_bytes=40),
        "conventions": conventions,
        "perplexity": 12.0,
        "kl_mean": 0.5,
        "non_finite": ("kl_max",),
        "layers": (LayerError(name="q", weight_error=0.1, output_error=None),),
        "seconds": 3.0,
    }
    return EvalReport(**{**fields, **changes})  # type: ignore[arg-type]


def test_every_leaf_of_the_recipe_is_a_parameter(make_recipe: Callable[..., Recipe]) -> None:
    params = recipe_params(make_recipe(bits=4, gate="{top1_min: 0.5}"))
    assert params["scheme.weights.bits"] == "4"
    assert params["calibration.samples"] == "4"
    assert params["gate.top1_min"] == "0.5"
    assert params["gate.kl_mean_max"] == "null"
    assert params["methods"].startswith('[{"name":"rtn"')


def test_metrics_are_the_finite_figures_the_sizes_and_the_cost() -> None:
    assert report_metrics(report()) == {
        "perplexity": 12.0,
        "kl_mean": 0.5,
        "evaluation_tokens": 14.0,
        "evaluation_s": 3.0,
        "size_bytes": 10.0,
        "base_size_bytes": 40.0,
    }


def test_the_files_hold_the_report_for_machines_and_people() -> None:
    texts = report_texts(report(), None)
    assert EvalReport.from_json(texts["report.json"]) == report()
    assert texts["report.md"].startswith("# Evaluation of c")
    assert "<!doctype html>" in texts["report.html"]
    table = layer_table(report())["layers.json"]
    assert (table["name"], table["weight_error"], table["output_error"]) == (["q"], [0.1], [None])
    assert layer_table(report(layers=())) == {}
