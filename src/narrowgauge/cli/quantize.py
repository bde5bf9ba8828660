"""`narrowgauge quantize`: a recipe in, a checkpoint out."""

import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from narrowgauge.quant.estimate import Estimate
    from narrowgauge.quant.pipeline.sequential import QuantizeResult, RunOptions
    from narrowgauge.quant.plan import Plan
    from narrowgauge.quant.recipe import Recipe
    from narrowgauge.quant.sources import LocalModel

_WORST = 5


def quantize(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder of the checkpoint; by default one below NG_HOME/work, by its inputs.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check every layer, estimate bytes, memory and time, and stop.")
    ] = False,
    *,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda, cuda:1.")] = "auto",
    activation_memory: Annotated[
        float, typer.Option(min=0.0, help="GiB of activations kept in memory; the rest is read from disk.")
    ] = 4.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard the work of an interrupted run.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")] = False,
) -> None:
    """Quantize the model that a recipe names and write the checkpoint. An interrupted run goes on where it was."""
    from narrowgauge.quant.pipeline import sequential
    from narrowgauge.quant.recipe import load_recipe
    from narrowgauge.quant.sources import resolve
    from narrowgauge.serving.settings import read_settings

    settings = read_settings()
    loaded = load_recipe(recipe)
    base = resolve(loaded.model.source, cache=settings.models)
    target = output or settings.work / f"{loaded.digest[:16]}-{base.digest[:8]}" / "checkpoint"
    options = sequential.RunOptions(
        device=device, activation_bytes=int(activation_memory * (1 << 30)), resume=not fresh
    )
    if dry_run:
        _show_plan(loaded, base, *sequential.dry_run(loaded, base, target, options=options), as_json=json)
        return
    _show_result(loaded, _with_progress(loaded, base, target, options), as_json=json)


def _with_progress(recipe: "Recipe", base: "LocalModel", target: Path, options: "RunOptions") -> "QuantizeResult":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from narrowgauge.quant.pipeline import sequential

    columns = (
        TextColumn("quantizing {task.fields[stage]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[eta]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("", total=None, stage=recipe.model.name, eta="")

        def show(progress: sequential.Progress) -> None:
            eta = "" if progress.eta_s is None else f"{progress.eta_s:.0f} s left"
            bars.update(bar, completed=progress.done, total=progress.total, stage=progress.stage, eta=eta)

        return sequential.quantize(recipe, base, target, options=options, progress=show)


def _show_plan(recipe: "Recipe", base: "LocalModel", plan: "Plan", estimate: "Estimate", *, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from narrowgauge.quant.formats.read import plain

    if as_json:
        value: dict[str, Any] = {
            "recipe_digest": recipe.digest,
            "base": plain(base),
            "plan": plain(plan),
            "estimate": plain(estimate) | {"shortages": list(estimate.shortages)},
        }
        print(json_text.dumps(value, indent=2))
        return
    table = Table(
        title=f"{recipe.model.name}: {len(plan.layers)} layers in {plan.blocks} blocks by {recipe.method_names}",
        title_justify="left",
    )
    for heading in ("scheme", "scales", "layers", "weights"):
        table.add_column(heading, justify="left" if heading == "scheme" else "right")
    for scheme in dict.fromkeys(plan.schemes.values()):
        layers = [layer for layer in plan.layers if layer.scheme == scheme]
        weights = sum(layer.out_features * layer.in_features for layer in layers)
        table.add_row(scheme.name, _scales(scheme.weights), str(len(layers)), f"{weights:,}")
    console = Console(soft_wrap=True)
    if plan.layers:
        console.print(table)
    if not plan.allotted:
        console.print(
            f"to be allotted by measured sensitivity: {recipe.scheme_name}; above stands the least each layer gets"
        )
    if plan.kv_cache is not None:
        console.print(f"KV cache: {plan.kv_cache.name}, scales for {len(plan.attentions)} attention layers")
    console.print(f"kept at full precision: {', '.join(plan.kept) or 'nothing'}")
    for warning in plan.warnings:
        console.print(f"note: {warning}", markup=False)
    at_most = "" if plan.allotted else "at most "
    console.print(f"weights: {plan.base_size_bytes:,} -> {at_most}{plan.size_bytes:,} bytes")
    _show_estimate(console, estimate)


def _scales(weights: Any) -> str:
    """What shares a scale, in few letters."""
    if weights.block is not None:
        return "x".join(map(str, weights.block))
    return "tensor" if weights.per_tensor else str(weights.group or "row")


def _show_estimate(console: "Console", estimate: "Estimate") -> None:
    console.print(
        f"disk while it runs: {_gib(estimate.disk_bytes)} of {_gib(estimate.disk_free_bytes)} free; "
        f"memory: about {_gib(estimate.memory_bytes)} of {_gib(estimate.memory_all_bytes)}"
        + (f", on the accelerator {_gib(estimate.device_bytes)}" if estimate.device_bytes else "")
    )
    console.print(f"time: about {_duration(estimate.seconds)}, by rates measured just now (to a factor of two)")
    for shortage in estimate.shortages:
        console.print(f"not enough {shortage}", markup=False)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _show_result(recipe: "Recipe", result: "QuantizeResult", *, as_json: bool) -> None:
    from rich.console import Console

    from narrowgauge.quant.formats.read import plain
    from narrowgauge.quant.pipeline.export import REPORT

    report: dict[str, Any] = json_text.loads((result.path / REPORT).read_bytes())
    if as_json:
        more = {key: report[key] for key in ("smoothing", "kv_cache", "allocation") if key in report}
        print(json_text.dumps({"recipe_digest": recipe.digest, **plain(result), **more}, indent=2))
        return
    console = Console(soft_wrap=True)
    if result.reused:
        console.print("found finished, made from the same recipe and base model: nothing to do")
    else:
        resumed = f", after {result.resumed} blocks of an interrupted run" if result.resumed else ""
        console.print(f"{len(result.layers)} layers in {result.seconds:.0f} s{resumed}")
    console.print(f"weights: {result.base_size_bytes:,} -> {result.size_bytes:,} bytes")
    _show_allocation(console, report.get("allocation"))
    _show_notes(console, result, report)
    _show_worst(console, result)
    console.print(f"digest  {result.digest}")
    console.print(f"checkpoint  {result.path}")


def _show_allocation(console: "Console", allocation: dict[str, Any] | None) -> None:
    """What each kind of unit got, and whether the sum of the units' KL came true."""
    if allocation is None:
        return
    from rich.table import Table

    table = Table(title=f"allocation: {allocation['bits']:.3f} bits a weight", title_justify="left")
    for heading in ("scheme", "scales", "units", "layers", "KL alone"):
        table.add_column(heading, justify="left" if heading == "scheme" else "right")
    from narrowgauge.quant.allocation.allocate import Allocation
    from narrowgauge.quant.formats.read import build

    read = build(Allocation, {key: allocation[key] for key in ("units", "predicted_kl", "bits")})
    for scheme in sorted({unit.scheme for unit in read.units}, key=lambda one: (one.weights.bits, one.name)):
        own = [unit for unit in read.units if unit.scheme == scheme]
        layers = sum(len(unit.layers) for unit in own)
        lost = sum(unit.kl for unit in own)
        table.add_row(scheme.name, _scales(scheme.weights), str(len(own)), str(layers), f"{lost:.4g}")
    console.print(table)
    console.print(
        f"KL to the base, nats a token: predicted {read.predicted_kl:.4g}, measured {allocation['measured_kl']:.4g}"
    )


def _show_notes(console: "Console", result: "QuantizeResult", report: dict[str, Any]) -> None:
    if fallbacks := [layer for layer in result.layers if layer.fallback]:
        console.print(
            f"rounded to nearest instead: {len(fallbacks)}, such as {fallbacks[0].name}: {fallbacks[0].fallback}"
        )
    if notes := [entry for entry in report.get("smoothing", ()) if entry["note"]]:
        first = notes[0]
        console.print(f"{first['method']}, {len(notes)} notes, such as {first['linears'][0]}: {first['note']}")
    if scales := report.get("kv_cache"):
        largest = max(max(entry["key"] + entry["value"]) for entry in scales)
        console.print(f"KV cache: scales for {len(scales)} attention layers, the largest {largest:.4g}")


def _show_worst(console: "Console", result: "QuantizeResult") -> None:
    from rich.table import Table

    if not result.layers:
        return
    table = Table(title="largest errors", title_justify="left")
    for heading in ("layer", "scheme", "weight error", "output error"):
        table.add_column(heading, justify="right" if heading.endswith("error") else "left")
    for layer in sorted(result.layers, key=lambda one: one.output_error or one.weight_error, reverse=True)[:_WORST]:
        output_error = "" if layer.output_error is None else f"{layer.output_error:.4f}"
        table.add_row(layer.name, layer.scheme, f"{layer.weight_error:.4f}", output_error)
    console.print(table)
