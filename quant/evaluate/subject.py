"""What a report says of the models it compares: what they are, what they were made from, what was noted in the making."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.quant.evaluate.report import LayerError, Subject
from narrowgauge.quant.evaluate.windows import EvaluationError
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.manifest import MANIFEST, read_manifest
from narrowgauge.quant.pipeline.export import REPORT
from narrowgauge.quant.sources import LocalModel

_NAMED = 5
"""Layers that one note names; the rest it counts."""


@dataclass(frozen=True, kw_only=True)
class Making:
    """What quantizing said of a checkpoint: the errors of its layers, remarks for people, the calibration's seed."""

    layers: tuple[LayerError, ...] = ()
    notes: tuple[str, ...] = ()
    seed: int | None = None


def describe(model: LocalModel) -> Subject:
    """What a report says of a checkpoint. Raises FormatError, CheckpointDamaged, EvaluationError."""
    reader = CheckpointReader(model.path)
    layout = reader.layout
    names = sorted({scheme.name for scheme in layout.linears.values()}) if layout else []
    if layout and layout.kv_cache:
        names.append(layout.kv_cache.name)
    manifest = read_manifest(model.path) if layout and (model.path / MANIFEST).exists() else None
    return Subject(
        name=model.source,
        digest=model.digest,
        scheme=" + ".join(names) or None,
        size_bytes=reader.size_bytes,
        revision=model.revision,
        recipe_digest=manifest.recipe_digest if manifest else None,
        calibration_digest=manifest.calibration_digest if manifest else None,
        calibration_seed=read_making(model.path).seed,
    )


def read_making(folder: Path) -> Making:
    """Reads quantization.json, which lies beside the weights of our own checkpoints; empty where there is none.

    Raises EvaluationError for one that cannot be read.
    """
    path = folder / REPORT
    if not path.exists():
        return Making()
    try:
        content = json.loads(path.read_bytes())
        layers = tuple(_layer(entry) for entry in content.get("layers", ()))
        seed = (content.get("calibration") or {}).get("seed")
        return Making(layers=layers, notes=(*_fallbacks(layers), *_allocation(content.get("allocation"))), seed=seed)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvaluationError(f"{path}: is not what quantizing writes: {error}") from None


def _layer(entry: Mapping[str, Any]) -> LayerError:
    return LayerError(
        name=entry["name"],
        weight_error=entry["weight_error"],
        output_error=entry.get("output_error"),
        scheme=entry.get("scheme"),
        fallback=entry.get("fallback"),
    )


def _fallbacks(layers: tuple[LayerError, ...]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for layer in layers:
        if layer.fallback is not None:
            by_reason.setdefault(layer.fallback, []).append(layer.name)
    notes = []
    for reason, names in by_reason.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        notes.append(f"fallback in {', '.join(names[:_NAMED])}{more}: {reason}")
    return notes


def _allocation(allocation: Mapping[str, Any] | None) -> list[str]:
    if not allocation:
        return []
    known = ("bits", "predicted_kl", "measured_kl")
    said = [f"{key.replace('_', ' ')} {allocation[key]:.4g}" for key in known if allocation.get(key) is not None]
    return [f"allocation: {', '.join(said)}"] if said else []
