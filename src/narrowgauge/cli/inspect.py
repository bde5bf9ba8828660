"""`narrowgauge inspect`: what lies in a checkpoint folder, and whether its bytes are those of its manifest."""

import json as json_text
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer


def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint or model folder.")],
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")] = False,
) -> None:
    """Show the format, schemes and sizes of a checkpoint and check every file against its manifest."""
    from rich.console import Console

    facts = _facts(checkpoint)
    if json:
        print(json_text.dumps(facts, indent=2))
        return
    console = Console(soft_wrap=True)
    for key, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{name}: {count}" for name, count in value.items()) or "none"
        text = f"{value:,}" if isinstance(value, int) else str(value)
        console.print(f"{key.replace('_', ' '):<18} {text}", highlight=False)


def _facts(folder: Path) -> dict[str, Any]:
    from narrowgauge.quant.formats.checkpoint import CheckpointReader
    from narrowgauge.quant.formats.manifest import MANIFEST, verify

    reader = CheckpointReader(folder)
    layout = reader.layout
    facts: dict[str, Any] = {
        "path": str(folder.absolute()),
        "architecture": ", ".join(reader.config.get("architectures") or ["unknown"]),
        "format": layout.format if layout else "full precision",
        "schemes": _schemes(layout.linears.values()) if layout else {},
        "tensors": len(reader.names()),
        "weight_bytes": reader.size_bytes,
    }
    if not (folder / MANIFEST).is_file():
        return {**facts, "manifest": "none"}
    manifest = verify(folder)
    return {
        **facts,
        "manifest": f"{len(manifest.files)} files, all as listed",
        "digest": manifest.digest,
        "bytes": manifest.size,
        "base": manifest.base.source,
        "recipe_digest": manifest.recipe_digest,
        "calibration_digest": manifest.calibration_digest,
    }


def _schemes(schemes: Any) -> dict[str, int]:
    """Layers by scheme, with the group in the key where there is one: {"W4A16 g64": 210}."""
    names = (s.name + (f" g{s.weights.group}" if s.weights.group else "") for s in schemes)
    return dict(sorted(Counter(names).items()))
