"""What quantizing will do, decided before anything is calibrated: which Linears get which Scheme, and what comes out."""

from dataclasses import dataclass

from narrowgauge.quant.blocks import Skeleton
from narrowgauge.quant.formats.base import get_format
from narrowgauge.quant.formats.scheme import GroupMismatch, Scheme, check_group
from narrowgauge.quant.recipe import Recipe, RecipeError, scheme_for

_NAMED = 6
"""Layers of one width that a refusal names; the rest it counts."""


@dataclass(frozen=True, kw_only=True)
class PlannedLayer:
    """One Linear [out_features, in_features] to be quantized."""

    name: str
    out_features: int
    in_features: int
    scheme: Scheme


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`layers` are quantized in this order, `kept` are the Linears left in full precision; sizes of weights in bytes."""

    layers: tuple[PlannedLayer, ...]
    kept: tuple[str, ...]
    blocks: int
    base_size_bytes: int
    size_bytes: int

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Scheme by layer name."""
        return {layer.name: layer.scheme for layer in self.layers}


def make_plan(recipe: Recipe, skeleton: Skeleton) -> Plan:
    """Resolves the recipe over the model. Raises RecipeError naming every layer or rule that does not fit."""
    reader = skeleton.reader
    if reader.layout is not None:
        raise RecipeError(
            f"{reader.folder}: is quantized already ({reader.layout.format}); name the model it came from"
        )
    shapes = skeleton.linears()
    inside = {name for index in range(len(skeleton.blocks)) for name in skeleton.block_linears(index)}
    if idle := [rule.match for rule in recipe.rules if not any(rule.matches(name) for name in shapes)]:
        raise RecipeError(
            f"rules: {', '.join(map(repr, idle))} match no Linear of the model, such as {next(iter(shapes))}"
        )
    layers, kept = [], []
    for name, (rows, columns) in shapes.items():
        scheme = scheme_for(recipe, name)
        if scheme is None or (name not in inside and not _named_by_rule(recipe, name)):
            kept.append(name)
        elif name not in inside:
            raise RecipeError(f"{name}: lies outside the decoder blocks and stays at 16 bits; write keep: true")
        else:
            layers.append(PlannedLayer(name=name, out_features=rows, in_features=columns, scheme=scheme))
    if refused := _refused_widths(layers):
        raise RecipeError(refused)
    checkpoint_format = get_format(recipe.format)
    checkpoint_format.config({layer.name: layer.scheme for layer in layers}, tuple(kept), None)
    saved = 0
    for layer in layers:
        before, elements = reader.size_of(f"{layer.name}.weight"), layer.out_features * layer.in_features
        shape = (layer.out_features, layer.in_features)
        saved += before - checkpoint_format.stored_bytes(shape, layer.scheme, before // elements)
    return Plan(
        layers=tuple(layers),
        kept=tuple(kept),
        blocks=len(skeleton.blocks),
        base_size_bytes=reader.size_bytes,
        size_bytes=reader.size_bytes - saved,
    )


def _named_by_rule(recipe: Recipe, name: str) -> bool:
    return any(rule.matches(name) for rule in recipe.rules)


def _refused_widths(layers: list[PlannedLayer]) -> str:
    """One sentence for each width that its group does not divide, with the layers of that width; empty if none."""
    found: dict[tuple[int, int], list[GroupMismatch]] = {}
    for layer in layers:
        if mismatch := check_group(layer.name, layer.in_features, layer.scheme.weights):
            found.setdefault((mismatch.in_features, mismatch.group), []).append(mismatch)
    sentences = []
    for first, *others in found.values():
        named = [other.layer for other in others[:_NAMED]]
        if len(others) > _NAMED:
            named.append(f"{len(others) - _NAMED} more")
        sentences.append(f"{first} (and {', '.join(named)})" if named else str(first))
    return "; ".join(sentences)
