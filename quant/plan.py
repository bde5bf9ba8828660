"""What quantizing will do, decided before anything is calibrated: which Linears get which Scheme, and what comes out."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from narrowgauge.quant.formats.base import CheckpointFormat, KVScales, get_format
from narrowgauge.quant.formats.scheme import KVCacheScheme, Scheme, check_group
from narrowgauge.quant.model.blocks import Skeleton
from narrowgauge.quant.model.fused import split_units
from narrowgauge.quant.recipe import DEFAULT_CANDIDATES, Recipe, RecipeError, scheme_for

_NAMED = 6
"""Layers that a refusal names for one reason; the rest it counts."""


@dataclass(frozen=True, kw_only=True)
class PlannedLayer:
    """One Linear [out_features, in_features] to be quantized."""

    name: str
    out_features: int
    in_features: int
    scheme: Scheme


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`layers` are quantized in this order, `kept` are the Linears left in full precision; sizes of weights in bytes.

    `attentions` are the modules that get scales for `kv_cache`. Where a budget is still to be allotted, each layer's
    scheme is the smallest candidate that it may get, and `size_bytes` is what the budget allows.
    """

    layers: tuple[PlannedLayer, ...]
    kept: tuple[str, ...]
    blocks: int
    base_size_bytes: int
    size_bytes: int
    kv_cache: KVCacheScheme | None = None
    attentions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    allotted: bool = True

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Scheme by layer name."""
        return {layer.name: layer.scheme for layer in self.layers}


def make_plan(recipe: Recipe, skeleton: Skeleton, schemes: Mapping[str, Scheme] | None = None) -> Plan:
    """Resolves the recipe over the model; `schemes` are what an allocation gave the layers that it was asked for.

    Raises RecipeError naming every layer or rule that does not fit, FormatError for what the format cannot say at all.
    """
    _check_whole(recipe, skeleton)
    shapes = skeleton.linears()
    layers, kept = _resolve(recipe, skeleton, shapes, schemes=schemes)
    checkpoint_format = get_format(recipe.format)
    reasons = {
        layer.name: reason
        for layer in layers
        if (reason := refusal(recipe, layer.name, (layer.out_features, layer.in_features), scheme=layer.scheme))
    }
    if reasons:
        raise RecipeError(_told(reasons))
    kv_cache = None if recipe.scheme is None else recipe.scheme.kv_cache
    attentions = _attentions(skeleton) if kv_cache else {}
    linears = {layer.name: layer.scheme for layer in layers}
    checkpoint_format.config(linears, kept, kv_cache)
    fused: dict[str, Scheme | None] = {name: linears.get(name) for name in shapes}
    allotted = recipe.scheme is not None or schemes is not None
    saved = sum(_saved(layer, skeleton, checkpoint_format) for layer in layers)
    size = skeleton.reader.size_bytes - saved
    if kv_cache is not None:
        size += _kv_bytes(kv_cache, attentions, skeleton, checkpoint_format=checkpoint_format)
    return Plan(
        layers=layers,
        kept=kept,
        blocks=len(skeleton.blocks),
        base_size_bytes=skeleton.reader.size_bytes,
        size_bytes=size if allotted else _budget_bytes(recipe, layers, size, skeleton=skeleton),
        kv_cache=kv_cache,
        attentions=tuple(attentions),
        warnings=split_units(fused),
        allotted=allotted,
    )


def refusal(recipe: Recipe, name: str, shape: tuple[int, int], *, scheme: Scheme) -> str | None:
    """Why the Linear `name` of `shape` (O, I) cannot have `scheme`, and what to do; None where it can."""
    if reason := recipe.rounder.refusal(scheme.weights):
        return f"{name}: {reason}"
    if mismatch := check_group(name, shape[1], scheme.weights):
        return str(mismatch)
    keep = f"keep the layer at 16 bits with a rule {{match: '{name}', keep: true}}"
    activations = scheme.activations
    if activations is not None and activations.group is not None and shape[1] % activations.group:
        smaller = [group for group in (128, 64, 32) if shape[1] % group == 0 and group < activations.group]
        advice = f"use blocks and groups of {' or '.join(map(str, smaller))}, " if smaller else ""
        return (
            f"{name}: in_features {shape[1]} is not a multiple of the activations' group {activations.group}, and loaders "
            f"fail on the first token; {advice}set activations to null (the last block of weights may be ragged), or {keep}"
        )
    if reason := get_format(recipe.format).refusal(shape, scheme):
        return f"{name}: {reason}; a rule {{match: '{name}', keep: true}} keeps the layer at 16 bits"
    return None


def candidates(recipe: Recipe) -> tuple[Scheme, ...]:
    """What an allocation may give a layer."""
    return recipe.candidates or DEFAULT_CANDIDATES


def fitting(recipe: Recipe, name: str, shape: tuple[int, int]) -> tuple[Scheme, ...]:
    """The candidates that the Linear `name` of `shape` (O, I) may have. Raises RecipeError where there is none."""
    reasons = {one: refusal(recipe, name, shape, scheme=one) for one in candidates(recipe)}
    found = tuple(one for one, reason in reasons.items() if reason is None)
    if not found:
        raise RecipeError(f"candidates: none of {len(reasons)} fits; {list(reasons.values())[-1]}")
    return found


def counted_bits(shape: tuple[int, int], scheme: Scheme, scale_bytes: int) -> int:
    """Bits of codes, scales and zero points of a Linear (O, I): what `target_bits` counts."""
    grid = math.prod(scheme.weights.grid(*shape))
    zeros = 0 if scheme.weights.symmetric else scheme.weights.bits
    return math.prod(shape) * scheme.weights.bits + grid * (8 * scale_bytes + zeros)


def allotted_names(recipe: Recipe, skeleton: Skeleton) -> dict[str, tuple[int, int]]:
    """(O, I) of the Linears that an allocation decides on: inside a block, no router, and no rule speaks of them."""
    routers = set(skeleton.routers())
    shapes = skeleton.linears()
    inside = (name for index in range(len(skeleton.blocks)) for name in skeleton.block_linears(index))
    return {name: shapes[name] for name in inside if name not in routers and not _named_by_rule(recipe, name)}


def scale_bytes(skeleton: Skeleton, name: str) -> int:
    """Bytes of one scale of the Linear `name`: scales are stored in the dtype of the weight."""
    stored = skeleton.source(name)
    return skeleton.reader.size_of(stored) // math.prod(skeleton.reader.shape(stored))


def _check_whole(recipe: Recipe, skeleton: Skeleton) -> None:
    reader = skeleton.reader
    if reader.layout is not None:
        raise RecipeError(
            f"{reader.folder}: is quantized already ({reader.layout.format}); name the model it came from"
        )
    longest = getattr(skeleton.model.config.get_text_config(), "max_position_embeddings", None)
    if longest and _calibrates(recipe) and recipe.calibration.length > longest:
        raise RecipeError(
            f"calibration.length: {recipe.calibration.length} is more than the model's {longest} positions; use at most that"
        )


def _calibrates(recipe: Recipe) -> bool:
    static = (
        recipe.scheme is not None and recipe.scheme.activations is not None and not recipe.scheme.activations.dynamic
    )
    kv = recipe.scheme is not None and recipe.scheme.kv_cache is not None
    return static or kv or recipe.scheme is None or any(method.needs for method in (*recipe.methods, recipe.rounder))


def _resolve(
    recipe: Recipe, skeleton: Skeleton, shapes: Mapping[str, tuple[int, int]], *, schemes: Mapping[str, Scheme] | None
) -> tuple[tuple[PlannedLayer, ...], tuple[str, ...]]:
    """The layers to quantize and the names of those to keep, routers that are no Linears among them."""
    if idle := [rule.match for rule in recipe.rules if not any(rule.matches(name) for name in shapes)]:
        raise RecipeError(
            f"rules: {', '.join(map(repr, idle))} match no Linear of the model, such as {next(iter(shapes))}"
        )
    inside = {name for index in range(len(skeleton.blocks)) for name in skeleton.block_linears(index)}
    routers = skeleton.routers()
    layers, kept, outside = [], [], {}
    for name, shape in shapes.items():
        by_rule = _named_by_rule(recipe, name)
        scheme = scheme_for(recipe, name)
        if recipe.scheme is None and name in inside and not by_rule:
            scheme = schemes.get(name) if schemes is not None else _smallest(recipe, name, shape, skeleton=skeleton)
        if scheme is None or (not by_rule and (name not in inside or name in routers)):
            kept.append(name)
        elif name not in inside:
            outside[name] = _outside(name, skeleton)
        else:
            layers.append(PlannedLayer(name=name, out_features=shape[0], in_features=shape[1], scheme=scheme))
    if outside:
        raise RecipeError(_told(outside))
    if schemes is not None and (strange := [name for name in schemes if name not in {layer.name for layer in layers}]):
        raise RecipeError(f"allocation: {strange[0]} is no Linear that it may decide on: it was made for another model")
    return tuple(layers), (*kept, *(name for name in routers if name not in shapes))


def _smallest(recipe: Recipe, name: str, shape: tuple[int, int], *, skeleton: Skeleton) -> Scheme | None:
    if name in skeleton.routers():
        return None
    width = scale_bytes(skeleton, name)
    return min(fitting(recipe, name, shape), key=lambda scheme: counted_bits(shape, scheme, width))


def _outside(name: str, skeleton: Skeleton) -> str:
    if getattr(skeleton.model.config.get_text_config(), "tie_word_embeddings", False) and name.endswith("lm_head"):
        return (
            f"{name}: is the embedding itself (tie_word_embeddings), and loaders that tie them again would read the codes as "
            "an embedding; leave it out of the rules, or write keep: true"
        )
    return f"{name}: lies outside the decoder blocks and stays at 16 bits; write keep: true"


def _named_by_rule(recipe: Recipe, name: str) -> bool:
    return any(rule.matches(name) for rule in recipe.rules)


def _attentions(skeleton: Skeleton) -> dict[str, int]:
    """kv heads by attention module. Raises RecipeError where the model has none."""
    found = [skeleton.attention(index) for index in range(len(skeleton.blocks))]
    parts = {part.name: part.kv_heads for part in found if part is not None}
    if not parts:
        raise RecipeError(
            f"scheme.kv_cache: {type(skeleton.model).__name__} keeps no keys and values by head; write kv_cache: null"
        )
    return parts


def _saved(layer: PlannedLayer, skeleton: Skeleton, checkpoint_format: CheckpointFormat) -> int:
    shape, width = (layer.out_features, layer.in_features), scale_bytes(skeleton, layer.name)
    return math.prod(shape) * width - checkpoint_format.stored_bytes(shape, layer.scheme, width)


def _kv_bytes(
    kv_cache: KVCacheScheme, attentions: Mapping[str, int], skeleton: Skeleton, *, checkpoint_format: CheckpointFormat
) -> int:
    """Bytes of the KV scales, as the format writes them. Raises FormatError where it cannot."""
    total = 0
    for name, heads in attentions.items():
        ones = torch.ones(heads if kv_cache.granularity == "head" else 1, dtype=torch.bfloat16)
        written = checkpoint_format.kv_tensors(name, KVScales(key=ones, value=ones))
        total += sum(tensor.numel() * tensor.element_size() for tensor in written.values())
    return total


def _budget_bytes(recipe: Recipe, layers: tuple[PlannedLayer, ...], least: int, *, skeleton: Skeleton) -> int:
    """What the weight files may take in all. Raises RecipeError where the smallest candidates take more."""
    if recipe.max_bytes is not None:
        if least > recipe.max_bytes:
            raise RecipeError(
                f"max_bytes: {recipe.max_bytes:,} is less than the {least:,} that the smallest candidates take"
            )
        return recipe.max_bytes
    assert recipe.target_bits is not None
    weights = sum(layer.out_features * layer.in_features for layer in layers)
    bits = sum(
        counted_bits((layer.out_features, layer.in_features), layer.scheme, scale_bytes(skeleton, layer.name))
        for layer in layers
    )
    if weights and bits > recipe.target_bits * weights:
        raise RecipeError(
            f"target_bits: {recipe.target_bits:g} is less than the {bits / weights:.3f} bits that the smallest candidates take"
        )
    return least + int(recipe.target_bits * weights - bits) // 8


def _told(reasons: Mapping[str, str]) -> str:
    """One sentence for each reason, with the layers that share it."""
    alike: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        alike.setdefault(reason.replace(name, ""), []).append(name)
    sentences = []
    for first, *others in alike.values():
        named = others[:_NAMED] + ([f"{len(others) - _NAMED} more"] if len(others) > _NAMED else [])
        sentences.append(f"{reasons[first]} (and {', '.join(named)})" if named else reasons[first])
    return "; ".join(sentences)
