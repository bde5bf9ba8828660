"""Recipe: what to do to which model, read from versioned YAML. Two recipes with equal digests give equal checkpoints."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from narrowgauge.quant.formats import read
from narrowgauge.quant.formats.base import FORMATS
from narrowgauge.quant.formats.scheme import Scheme
from narrowgauge.quant.methods.base import METHODS, QuantMethod


class RecipeError(ValueError):
    """A recipe that cannot be carried out; the message says where and what to write instead."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The base model: a URI for `sources.resolve`, and the name it is registered and served under."""

    source: str
    name: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ValueError(f"name: {self.name!r} may hold only letters, digits, '.', '_' and '-'")


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """One source of text (see texts.documents) and its share of the samples."""

    text: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise ValueError(f"weight: must be above zero, not {self.weight}")


@dataclass(frozen=True, kw_only=True)
class CalibrationSpec:
    """Calibration tokens: `samples` windows of `length` tokens, drawn from `sources` by their weights."""

    sources: tuple[TextSource, ...] = (TextSource(text="pydoc"),)
    samples: int = 64
    length: int = 512
    template: Literal["none"] = "none"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources: an empty calibration set; name at least one text, such as {text: pydoc}")
        if self.samples < 1:
            raise ValueError(f"samples: must be at least 1, not {self.samples}")
        if self.length < 2:
            raise ValueError(f"length: must be at least 2 tokens, not {self.length}")


@dataclass(frozen=True, kw_only=True)
class LayerRule:
    """An exception for some Linears: keep them in full precision, or give them another Scheme.

    `match` is an exact module name, or "re:" + a regex that must match from the name's start (end it with $).
    """

    match: str
    keep: bool = False
    scheme: Scheme | None = None

    def __post_init__(self) -> None:
        if self.keep == (self.scheme is not None):
            raise ValueError("give either keep: true or a scheme")
        if self.match.startswith("re:"):
            try:
                re.compile(self.match.removeprefix("re:"))
            except re.error as error:
                raise ValueError(f"match: {self.match!r} is not a regular expression: {error}") from None

    def matches(self, layer: str) -> bool:
        """Whether the rule speaks of the Linear of that name."""
        if self.match.startswith("re:"):
            return re.match(self.match.removeprefix("re:"), layer) is not None
        return self.match == layer


@dataclass(frozen=True, kw_only=True)
class GateSpec:
    """Limits that the evaluation must keep; null means no limit."""

    perplexity_ratio_max: float | None = None
    kl_mean_max: float | None = None
    top1_min: float | None = None


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """How quantization is run."""

    processes: int = 1

    def __post_init__(self) -> None:
        if self.processes != 1:
            raise ValueError(f"processes: this release quantizes in 1 process, not {self.processes}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole recipe. `rules`: the first that matches a layer wins; others get `scheme`."""

    version: int
    model: ModelSpec
    methods: tuple[QuantMethod, ...]
    scheme: Scheme
    calibration: CalibrationSpec = CalibrationSpec()
    rules: tuple[LayerRule, ...] = ()
    format: str = "compressed-tensors"
    gate: GateSpec = GateSpec()
    launch: LaunchSpec = LaunchSpec()

    def __post_init__(self) -> None:
        if self.version != 1:
            raise ValueError(f"version: this release reads recipes of version 1, not {self.version}")
        if len(self.methods) != 1:
            raise ValueError(f"methods: needs exactly one of {', '.join(sorted(METHODS))}, not {len(self.methods)}")
        if self.format not in FORMATS:
            hint = read.nearest(self.format, FORMATS)
            raise ValueError(f"format: unknown format {self.format!r}{hint}; known: {', '.join(sorted(FORMATS))}")

    @property
    def method(self) -> QuantMethod:
        """The method that rounds the weights."""
        return self.methods[-1]

    @property
    def digest(self) -> str:
        """SHA-256 of the recipe's canonical JSON, defaults filled in."""
        return read.digest(self)


def load_recipe(path: Path) -> Recipe:
    """Reads a recipe from a YAML file. Raises RecipeError: unknown, missing and mistyped keys, with their path."""
    try:
        return read.load(Recipe, path, registries={QuantMethod: METHODS})
    except read.ReadError as error:
        raise RecipeError(str(error)) from None


def scheme_for(recipe: Recipe, layer_name: str) -> Scheme | None:
    """The Scheme of one Linear; None keeps it in full precision. A head named lm_head is kept unless a rule names it."""
    for rule in recipe.rules:
        if rule.matches(layer_name):
            return rule.scheme
    return None if layer_name.rpartition(".")[2] == "lm_head" else recipe.scheme
