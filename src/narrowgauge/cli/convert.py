"""`narrowgauge convert`: a quantized checkpoint in another format, bit for bit, or refused with the reason."""

import json as json_text
from pathlib import Path
from typing import Annotated

import typer


def convert(
    checkpoint: Annotated[Path, typer.Argument(help="A quantized checkpoint folder.")],
    output: Annotated[Path, typer.Argument(help="The folder to write; must not exist or be empty.")],
    format: Annotated[
        str,
        typer.Option("--format", help="compressed-tensors, gptq, gptq_v2, awq, fp8; none gives full precision."),
    ],
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")] = False,
) -> None:
    """Write a checkpoint in another format: the same codes, zero points and scales, or a refusal that says why."""
    from rich.console import Console

    from narrowgauge.quant.convert import convert as run
    from narrowgauge.quant.formats.read import plain

    result = run(checkpoint, output, format)
    if json:
        print(json_text.dumps({**plain(result), "path": str(result.path)}, indent=2))
        return
    console = Console(soft_wrap=True)
    console.print(f"{result.layers} layers from {result.source_format} to {result.format}", highlight=False)
    console.print(f"weights: {result.source_size_bytes:,} -> {result.size_bytes:,} bytes", highlight=False)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False)
    console.print(f"digest  {result.digest}\ncheckpoint  {result.path}", highlight=False)
