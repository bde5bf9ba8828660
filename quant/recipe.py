"""Recipe: what to do to which model, read from versioned YAML. Two recipes with equal digests give equal checkpoints."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from narrowgauge.quant.formats import read
from narrowgauge.quant.formats.base import FORMATS
from narrowgauge.quant.formats.scheme import ActivationScheme, KVCacheScheme, Scheme, WeightScheme
from narrowgauge.quant.methods.base import METHODS, QuantMethod, Rounder, Smoother


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
    """One source of text (see texts.stream) and its share of the samples; `template` null is the calibration's."""

    text: str
    weight: float = 1.0
    template: Literal["none", "chat"] | None = None

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise ValueError(f"weight: must be above zero, not {self.weight}")


@dataclass(frozen=True, kw_only=True)
class CalibrationSpec:
    """Calibration tokens: `samples` windows of `length` tokens, drawn from `sources` by their weights.

    `template: chat` writes conversations as the tokenizer's chat template does; `none` takes them as plain text.
    `experts: all` calibrates each expert of a mixture on all tokens, `routed` on those that are sent to it.
    """

    sources: tuple[TextSource, ...] = (TextSource(text="pydoc"),)
    samples: int = 64
    length: int = 512
    template: Literal["none", "chat"] = "none"
    seed: int = 0
    experts: Literal["routed", "all"] = "routed"

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

    def __post_init__(self) -> None:
        if self.perplexity_ratio_max is not None and self.perplexity_ratio_max <= 0:
            raise ValueError(f"perplexity_ratio_max: must be above 0 (1 is no loss), not {self.perplexity_ratio_max:g}")
        if self.kl_mean_max is not None and self.kl_mean_max < 0:
            raise ValueError(f"kl_mean_max: must be at least 0 nats, not {self.kl_mean_max:g}: nothing could pass")
        if self.top1_min is not None and not 0 <= self.top1_min <= 1:
            raise ValueError(f"top1_min: must be a share between 0 and 1 (0.75, not 75), not {self.top1_min:g}")


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """How quantization is run."""

    processes: int = 1

    def __post_init__(self) -> None:
        if self.processes != 1:
            raise ValueError(f"processes: this release quantizes in 1 process, not {self.processes}")


@dataclass(frozen=True, kw_only=True)
class ModelScheme:
    """What a whole model is rounded to: its Linears (weights null: none of them) and its KV cache."""

    weights: WeightScheme | None
    activations: ActivationScheme | None = None
    kv_cache: KVCacheScheme | None = None

    def __post_init__(self) -> None:
        if self.weights is None and self.activations is not None:
            raise ValueError("activations: are rounded only together with weights; give weights, or set null")
        if self.weights is None and self.kv_cache is None:
            raise ValueError("weights and kv_cache are both null: nothing would be quantized")
        if self.weights is not None:
            Scheme(weights=self.weights, activations=self.activations)

    @property
    def linear(self) -> Scheme | None:
        """The Scheme of a Linear that no rule speaks of."""
        return None if self.weights is None else Scheme(weights=self.weights, activations=self.activations)

    @property
    def name(self) -> str:
        """The short names of its parts: W4A16, W8A8-fp8 + KV8-fp8, ..."""
        return " + ".join(part.name for part in (self.linear, self.kv_cache) if part is not None)


DEFAULT_CANDIDATES = (
    Scheme(weights=WeightScheme(bits=4, group=128)),
    Scheme(weights=WeightScheme(bits=4, group=64)),
    Scheme(weights=WeightScheme(bits=4, group=32)),
    Scheme(weights=WeightScheme(bits=8)),
)
"""What an allocation chooses from where the recipe names nothing; those that do not fit a layer's width are left out.

4 and 8 bits alone, since other widths are packed in ways that not all readers share, and symmetric, which every engine has
a fast kernel for. At 8 bits one scale a row loses 0.6 % of what 4 bits with groups of 64 lose, groups of 64 lose 0.3 %:
the difference buys nothing (SmolLM2, infra/bench/mixed_precision.py).
"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole recipe. `rules`: the first that matches a layer wins; others get `scheme`.

    Instead of `scheme`, a budget: `target_bits` (codes, scales and zero points, over all weights of the quantized Linears)
    or `max_bytes` (of all weight files). Then each group of Linears gets one of `candidates`, by measured sensitivity.
    """

    version: int
    model: ModelSpec
    methods: tuple[QuantMethod, ...] = ()
    scheme: ModelScheme | None = None
    target_bits: float | None = None
    max_bytes: int | None = None
    candidates: tuple[Scheme, ...] = ()
    calibration: CalibrationSpec = CalibrationSpec()
    rules: tuple[LayerRule, ...] = ()
    format: str = "compressed-tensors"
    gate: GateSpec = GateSpec()
    launch: LaunchSpec = LaunchSpec()

    def __post_init__(self) -> None:
        if self.version != 1:
            raise ValueError(f"version: this release reads recipes of version 1, not {self.version}")
        if (self.scheme is not None) + (self.target_bits is not None) + (self.max_bytes is not None) != 1:
            raise ValueError("scheme: give exactly one of scheme, target_bits and max_bytes")
        if self.candidates and self.scheme is not None:
            raise ValueError("candidates: go with target_bits or max_bytes, not with a scheme")
        self._check_methods()
        if self.format not in FORMATS:
            hint = read.nearest(self.format, FORMATS)
            raise ValueError(f"format: unknown format {self.format!r}{hint}; known: {', '.join(sorted(FORMATS))}")

    def _check_methods(self) -> None:
        rounds = [isinstance(method, Rounder) for method in self.methods]
        if any(rounds[:-1]):
            raise ValueError("methods: smoothers come first, and one rounder (rtn, gptq, fp8) at most, last")
        names = [method.name for method in self.methods]
        if len(set(names)) < len(names):
            raise ValueError("methods: the same method stands twice")
        weights = self.scheme is None or self.scheme.weights is not None or any(rule.scheme for rule in self.rules)
        if weights and not names:
            raise ValueError(f"methods: name at least one of {', '.join(sorted(METHODS))}")

    @property
    def smoothers(self) -> tuple[Smoother, ...]:
        """The methods before rounding, in order."""
        return tuple(method for method in self.methods if isinstance(method, Smoother))

    @property
    def rounder(self) -> Rounder:
        """The method that rounds the weights: round to nearest where only smoothers are named."""
        if self.methods and isinstance(self.methods[-1], Rounder):
            return self.methods[-1]
        rounder: Rounder = read.lookup(METHODS, "rtn")(name="rtn")
        return rounder

    @property
    def method_names(self) -> str:
        """ "awq + gptq": the methods as people say them."""
        return " + ".join(method.name for method in self.methods) or "calibration"

    @property
    def scheme_name(self) -> str:
        """The scheme as people say it; "mixed 4.78 bits" for an allocation."""
        if self.scheme is not None:
            return self.scheme.name
        return f"mixed {self.target_bits:g} bits" if self.target_bits is not None else f"mixed {self.max_bytes:,} bytes"

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
    if layer_name.rpartition(".")[2] == "lm_head" or recipe.scheme is None:
        return None
    return recipe.scheme.linear
