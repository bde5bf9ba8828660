"""`narrowgauge inspect`: what lies in a checkpoint folder, and whether its bytes are those of its manifest."""

import json as json_text
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from narrowgauge.quant.formats.checkpoint import CheckpointReader
    from narrowgauge.quant.formats.scheme import Scheme


def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint or model folder.")],
    layers: Annotated[bool, typer.Option("--layers", help="List every quantized layer.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout, layers included.")] = False,
) -> None:
    """Show the format, schemes and sizes of a checkpoint, warn of what it misstates, and check every file's digest."""
    from narrowgauge.quant.formats.checkpoint import CheckpointReader

    reader = CheckpointReader(checkpoint)
    facts = {**_facts(reader), **_manifest(checkpoint)}
    listed = _layers(reader) if layers or json else []
    if json:
        print(json_text.dumps({**facts, "layers": listed}, indent=2))
        return
    _print(facts, listed)


def _print(facts: dict[str, Any], layers: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    warnings = facts.pop("warnings")
    for key, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{name}: {count}" for name, count in value.items()) or "none"
        text = f"{value:,}" if isinstance(value, int) else str(value)
        console.print(f"{key.replace('_', ' '):<18} {text}", highlight=False)
    for warning in warnings:
        console.print(f"{'warning':<18} {warning}", highlight=False)
    if not layers:
        return
    table = Table()
    for heading in ("layer", "scheme", "tensors", "bytes"):
        table.add_column(heading, justify="right" if heading == "bytes" else "left")
    for layer in layers:
        stored = ", ".join(f"{name} {text}" for name, text in layer["tensors"].items())
        table.add_row(layer["name"], layer["scheme"], stored, f"{layer['bytes']:,}")
    console.print(table)


def _facts(reader: "CheckpointReader") -> dict[str, Any]:
    layout = reader.layout
    schemes = Counter(_scheme_text(scheme) for scheme in layout.linears.values()) if layout else Counter()
    return {
        "path": str(reader.folder.absolute()),
        "architecture": ", ".join(reader.config.get("architectures") or ["unknown"]),
        "format": layout.format if layout else "full precision",
        "schemes": dict(sorted(schemes.items())),
        "kv_cache": layout.kv_cache.name if layout and layout.kv_cache else "full precision",
        "kv_scales": _kv_scales(reader),
        "tensors": len(reader.names()),
        "weight_bytes": reader.size_bytes,
        "warnings": list(layout.warnings) if layout else [],
    }


def _manifest(folder: Path) -> dict[str, Any]:
    from narrowgauge.quant.formats.manifest import MANIFEST, verify

    if not (folder / MANIFEST).is_file():
        return {"manifest": "none"}
    manifest = verify(folder)
    return {
        "manifest": f"{len(manifest.files)} files, all as listed",
        "digest": manifest.digest,
        "bytes": manifest.size,
        "base": manifest.base.source,
        "recipe_digest": manifest.recipe_digest,
        "calibration_digest": manifest.calibration_digest,
    }


def _kv_scales(reader: "CheckpointReader") -> str:
    """How many attention layers have KV scales, and between which values these lie."""
    found = [scales for name in reader.attentions if (scales := reader.kv_scales(name)) is not None]
    if not found:
        return "none"
    values = [float(value) for scales in found for tensor in (scales.key, scales.value) for value in tensor]
    return f"{len(found)} layers, {min(values):.4g} to {max(values):.4g}"


def _layers(reader: "CheckpointReader") -> list[dict[str, Any]]:
    """Each quantized Linear: its scheme, its tensors by local name as "dtype [shape]", and the bytes they take."""
    if reader.layout is None:
        return []
    stored: dict[str, list[str]] = {name: [] for name in reader.layout.linears}
    for name in reader.names():
        module, _, local = name.rpartition(".")
        if module in stored:
            stored[module].append(local)
    return [
        {
            "name": name,
            "scheme": _scheme_text(reader.layout.linears[name]),
            "tensors": {local: _tensor_text(reader, f"{name}.{local}") for local in locals_},
            "bytes": sum(reader.size_of(f"{name}.{local}") for local in locals_),
        }
        for name, locals_ in stored.items()
    ]


def _tensor_text(reader: "CheckpointReader", name: str) -> str:
    tensor = reader.stored(name)
    return f"{tensor.dtype} {list(tensor.shape)}"


def _scheme_text(scheme: "Scheme") -> str:
    """The scheme's short name, with the group where there is one: "W4A16 g64"."""
    return scheme.name + (f" g{scheme.weights.group}" if scheme.weights.group else "")
