"""register, list, show: the registry from the command line."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from narrowgauge.serving.registry import ModelVersion, Registry

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def register(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint: a folder or a URI.")],
    name: Annotated[str, typer.Option(help="The model's name in the registry.")],
    report: Annotated[
        Path | None, typer.Option(help="report.json that `evaluate` wrote about this checkpoint.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="The recipe whose gate gives the verdict on the report.")] = None,
    as_json: Json = False,
) -> None:
    """Register a checkpoint. With --report and --recipe, 'candidate' moves to it if the recipe's gate passes (else exit 3)."""
    from narrowgauge.cli.main import EXIT_GATE
    from narrowgauge.flows.register import read_report, register_checkpoint
    from narrowgauge.quant.recipe import load_recipe
    from narrowgauge.serving.settings import read_settings

    judged = None if report is None else read_report(report)
    rules = None if recipe is None else load_recipe(recipe)
    version = register_checkpoint(checkpoint, name, judged, recipe=rules, settings=read_settings())
    if as_json:
        print(json.dumps(_version_json(version)))
    else:
        _print_versions(f"{version.name}", [version])
    if version.verdict == "rejected":
        raise typer.Exit(EXIT_GATE)


def list_models(as_json: Json = False) -> None:
    """List the registered models."""
    registry = _registry()
    models = {name: registry.versions(name) for name in registry.models()}
    if as_json:
        print(json.dumps({name: [_version_json(version) for version in versions] for name, versions in models.items()}))
        return
    table = Table("model", "versions", "champion", "candidate", title="Registered models")
    for name, versions in models.items():
        by_alias = {alias: str(version.version) for version in versions for alias in version.aliases}
        table.add_row(name, str(len(versions)), by_alias.get("champion", "-"), by_alias.get("candidate", "-"))
    Console().print(table if models else "no models are registered; `narrowgauge register` or `release` adds one")


def show(
    model: Annotated[str, typer.Argument(help="MODEL, MODEL@ALIAS or MODEL/VERSION.")],
    as_json: Json = False,
) -> None:
    """Show a model's versions, or one version with its figures."""
    registry = _registry()
    if "@" in model or "/" in model:
        version = registry.resolve(f"models:/{model}")
        _show_version(version, registry.metrics(version), as_json=as_json)
        return
    versions = registry.versions(model)
    if not versions:
        registry.resolve(f"models:/{model}/1")  # says what is missing
    if as_json:
        print(json.dumps([_version_json(version) for version in versions]))
    else:
        _print_versions(model, list(versions))


def _show_version(version: "ModelVersion", metrics: dict[str, float], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**_version_json(version), "metrics": metrics}))
        return
    table = Table("", "", title=f"{version.name} version {version.version}", show_header=False)
    for key, value in _version_json(version).items():
        if key != "tags":
            table.add_row(key, ", ".join(value) if isinstance(value, list) else str(value))
    for key, value in version.tags.items():
        table.add_row(key, value)
    for key, figure in sorted(metrics.items()):
        table.add_row(key, f"{figure:g}")
    Console().print(table)


def _print_versions(title: str, versions: "list[ModelVersion]") -> None:
    table = Table("version", "verdict", "scheme", "aliases", "rollout", "digest", title=title)
    for version in versions:
        table.add_row(
            str(version.version),
            version.verdict,
            version.scheme or "-",
            ", ".join(version.aliases) or "-",
            version.tags.get("narrowgauge.rollout", "-"),
            version.digest[:12],
        )
    Console().print(table)


def _version_json(version: "ModelVersion") -> dict[str, Any]:
    from narrowgauge.quant.formats.read import plain

    fields: dict[str, Any] = plain(version)
    return fields


def _registry() -> "Registry":
    from narrowgauge.serving.registry import Registry
    from narrowgauge.serving.settings import read_settings

    settings = read_settings()
    return Registry(settings.mlflow_tracking_uri, home=settings.home)
