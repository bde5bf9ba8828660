"""release: the main job as one command."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from narrowgauge.flows.release import ReleaseOutcome


def release(
    recipe: Annotated[Path, typer.Argument(help="The recipe (YAML).")],
    rollout: Annotated[
        Path | None, typer.Option(help="A RolloutSpec (YAML); without it the release ends registered.")
    ] = None,
    prefect: Annotated[
        bool, typer.Option("--prefect/--no-prefect", help="Run as a Prefect flow, or as plain calls.")
    ] = True,
    override_gate: Annotated[
        str | None,
        typer.Option(metavar="REASON", help="Roll out although the recipe's gate rejects; the reason is kept."),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of held-out text to judge by.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Quantize, evaluate, register and, with --rollout, roll out under health gates (exit code 3: a gate said no)."""
    from narrowgauge.flows.evaluate import HeldOutText
    from narrowgauge.flows.progress import Terminal
    from narrowgauge.flows.release import ReleaseRequest
    from narrowgauge.flows.runs import run_release
    from narrowgauge.flows.settings import read_flow_settings
    from narrowgauge.quant.formats.read import plain
    from narrowgauge.quant.recipe import load_recipe
    from narrowgauge.serving.rollout.spec import load_rollout_spec

    request = ReleaseRequest(
        recipe=load_recipe(recipe),
        rollout=None if rollout is None else load_rollout_spec(rollout),
        override=override_gate,
        text=HeldOutText(windows=windows, length=length),
    )
    with Terminal() as watch:
        outcome = run_release(request, settings=read_flow_settings(), watch=watch, prefect=prefect)
    if as_json:
        print(json.dumps({**plain(outcome), "exit_code": outcome.exit_code}))
    else:
        _print(outcome)
    raise typer.Exit(outcome.exit_code)


def _print(outcome: "ReleaseOutcome") -> None:
    from narrowgauge.quant.evaluate.report import FIGURES, show

    checkpoint, report, version = outcome.checkpoint, outcome.judgement.report, outcome.version
    table = Table("", "", title=f"{version.name} version {version.version} ({checkpoint.scheme})", show_header=False)
    table.add_row("digest", checkpoint.digest)
    table.add_row(
        "weights", f"{checkpoint.size_bytes / 1e6:.1f} MB of the base's {checkpoint.base_size_bytes / 1e6:.1f} MB"
    )
    for name, label in FIGURES.items():
        if getattr(report, name) is not None:
            table.add_row(label, show(name, getattr(report, name)))
    table.add_row("verdict", version.verdict)
    for reason in outcome.judgement.reasons:
        table.add_row("", Text(reason))
    if outcome.rollout is not None:
        gate = f" by gate {outcome.rollout.gate}" if outcome.rollout.gate else ""
        table.add_row("rollout", Text(f"{outcome.rollout.phase}{gate}: {outcome.rollout.reason}"))
    Console().print(table)
