"""`narrowgauge quantize`: a recipe in, a checkpoint out."""

import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from narrowgauge.quant.plan import Plan
    from narrowgauge.quant.recipe import Recipe
    from narrowgauge.quant.sequential import QuantizeResult
    from narrowgauge.quant.sources import LocalModel

_WORST = 5


def quantize(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder of the checkpoint; by default one below NG_HOME/work, by its inputs.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, check it, and stop.")] = False,
    *,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")] = False,
) -> None:
    """Quantize the model that a recipe names and write the checkpoint."""
    from narrowgauge.quant import sequential
    from narrowgauge.quant.recipe import load_recipe
    from narrowgauge.quant.sources import resolve
    from narrowgauge.serving.settings import read_settings

    settings = read_settings()
    loaded = load_recipe(recipe)
    base = resolve(loaded.model.source, cache=settings.models)
    if dry_run:
        _show_plan(loaded, base, sequential.plan(loaded, base), as_json=json)
        return
    target = output or settings.work / f"{loaded.digest[:16]}-{base.digest[:8]}" / "checkpoint"
    _show_result(loaded, _with_progress(loaded, base, target), as_json=json)


def _with_progress(recipe: "Recipe", base: "LocalModel", target: Path) -> "QuantizeResult":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from narrowgauge.quant import sequential

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

        return sequential.quantize(recipe, base, target, progress=show)


def _show_plan(recipe: "Recipe", base: "LocalModel", plan: "Plan", *, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from narrowgauge.quant.formats.read import plain

    if as_json:
        value: dict[str, Any] = {"recipe_digest": recipe.digest, "base": plain(base), "plan": plain(plan)}
        print(json_text.dumps(value, indent=2))
        return
    table = Table(
        title=f"{recipe.model.name}: {len(plan.layers)} layers in {plan.blocks} blocks by {recipe.method_names}"
    )
    for heading in ("scheme", "group", "layers", "weights"):
        table.add_column(heading, justify="left" if heading == "scheme" else "right")
    for scheme in dict.fromkeys(plan.schemes.values()):
        layers = [layer for layer in plan.layers if layer.scheme == scheme]
        weights = sum(layer.out_features * layer.in_features for layer in layers)
        table.add_row(scheme.name, str(scheme.weights.group or "row"), str(len(layers)), f"{weights:,}")
    console = Console()
    console.print(table)
    console.print(f"kept at full precision: {', '.join(plan.kept) or 'nothing'}")
    console.print(f"weights: {plan.base_size_bytes:,} -> {plan.size_bytes:,} bytes")


def _show_result(recipe: "Recipe", result: "QuantizeResult", *, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from narrowgauge.quant.formats.read import plain

    if as_json:
        print(json_text.dumps({"recipe_digest": recipe.digest, **plain(result)}, indent=2))
        return
    console = Console(soft_wrap=True)
    if result.reused:
        console.print("found finished, made from the same recipe and base model: nothing to do")
    else:
        console.print(f"{len(result.layers)} layers in {result.seconds:.0f} s")
    console.print(f"weights: {result.base_size_bytes:,} -> {result.size_bytes:,} bytes")
    if fallbacks := [layer for layer in result.layers if layer.fallback]:
        console.print(
            f"rounded to nearest instead: {len(fallbacks)}, such as {fallbacks[0].name}: {fallbacks[0].fallback}"
        )
    table = Table(title="largest errors", title_justify="left")
    for heading in ("layer", "scheme", "weight error", "output error"):
        table.add_column(heading, justify="right" if heading.endswith("error") else "left")
    for layer in sorted(result.layers, key=lambda one: one.output_error or one.weight_error, reverse=True)[:_WORST]:
        output_error = "" if layer.output_error is None else f"{layer.output_error:.4f}"
        table.add_row(layer.name, layer.scheme, f"{layer.weight_error:.4f}", output_error)
    console.print(table)
    console.print(f"digest  {result.digest}")
    console.print(f"checkpoint  {result.path}")
