"""compressed-tensors' part of config.json: config groups, targets, ignore lists; written small, read in old spellings.

Keys are the smallest set that every release from 0.9 to 0.20 accepts: their configuration classes refuse unknown keys, and
some releases refuse keys that others write. What is never written: nulls of optional arguments, actorder, scale_dtype.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from narrowgauge.quant.formats.base import FormatError
from narrowgauge.quant.formats.scheme import ActivationScheme, Granularity, Scheme, WeightScheme

_WHERE = "quantization_config.config_groups"
_STRATEGIES: dict[Granularity, str] = {"tensor": "tensor", "channel": "channel", "group": "group", "block": "block"}
_SPARSE = ("sparse-bitmask", "sparse-24-bitmask", "marlin-24")
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, kw_only=True)
class ConfigGroup:
    """One config group: the Linears it speaks of, and their Scheme."""

    targets: tuple[str, ...]
    scheme: Scheme


def format_of(scheme: Scheme) -> str:
    """The storage format that the library's own rule gives a Scheme."""
    if scheme.weights.type == "int":
        return "pack-quantized" if scheme.activations is None else "int-quantized"
    return "naive-quantized" if scheme.activations is None else "float-quantized"


def write_groups(linears: Mapping[str, Scheme], kept: Iterable[str]) -> dict[str, Any]:
    """`config_groups`: one group a Scheme. A single one targets "Linear"; several name their layers and are disjoint."""
    by_scheme: dict[Scheme, list[str]] = {}
    for name, scheme in linears.items():
        by_scheme.setdefault(scheme, []).append(name)
    every = {*linears, *kept}
    groups = {}
    for index, (scheme, names) in enumerate(by_scheme.items()):
        activations = scheme.activations
        groups[f"group_{index}"] = {
            "format": format_of(scheme),
            "input_activations": None if activations is None else _activation_arguments(activations),
            "output_activations": None,
            "targets": ["Linear"] if len(by_scheme) == 1 else _name_layers(names, every),
            "weights": _weight_arguments(scheme.weights),
        }
    return groups


def read_groups(config: Mapping[str, Any]) -> tuple[ConfigGroup, ...]:
    """The config groups in order: the first that matches a module holds. Raises FormatError for what is not read."""
    _refuse_transforms(config)
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping):
        raise FormatError(f"{_WHERE} is missing")
    return tuple(_read_group(f"{_WHERE}.{key}", group, config) for key, group in groups.items())


def matches(name: str, entries: Iterable[str], *, classes: bool = True) -> bool:
    """The library's matcher: an exact name, "re:" + a regex anchored at its start only, or the class "Linear"."""
    for entry in entries:
        if entry.startswith("re:"):
            if re.match(entry.removeprefix("re:"), name):
                return True
        elif entry == name or (classes and entry == "Linear"):
            return True
    return False


def unmatched(entries: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Entries of `ignore` that name no module, stale names such as after a renaming; class names are not looked at.

    A tied lm_head has no tensor of its own, so it counts as there.
    """
    names = {"lm_head"}
    for module in modules:
        parts = module.split(".")
        names |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return [entry for entry in entries if not _is_class(entry) and not _names_one_of(entry, names)]


def _is_class(entry: str) -> bool:
    return not entry.startswith("re:") and "." not in entry and entry[:1].isupper()


def _names_one_of(entry: str, names: set[str]) -> bool:
    return entry in names or (entry.startswith("re:") and any(matches(name, (entry,)) for name in names))


def _name_layers(names: list[str], every: set[str]) -> list[str]:
    """Targets for the layers by exact name; experts that all share a Scheme as one regex a layer and projection.

    vLLM looks for each part of a fused layer (q, k, v; gate, up) by its own name, so exact names resolve there as well.
    """
    targets, by_family = [], dict[str, list[str]]()
    for name in names:
        by_family.setdefault(_family(name), []).append(name)
    total: dict[str, int] = {}
    for name in every:
        total[_family(name)] = total.get(_family(name), 0) + 1
    for family, members in by_family.items():
        targets += [f"re:{family}$"] if len(members) == total[family] and len(members) > 1 else members
    return sorted(targets)


def _family(name: str) -> str:
    """A regex for the name in which an expert's number, the second number of a name, is any number."""
    numbers = list(_NUMBER.finditer(name))
    if len(numbers) < 2:
        return re.escape(name)
    last = numbers[-1]
    return re.escape(name[: last.start()]) + r"\d+" + re.escape(name[last.end() :])


def _weight_arguments(weights: WeightScheme) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "dynamic": False,
        "num_bits": weights.bits,
        "strategy": _STRATEGIES[weights.granularity],
        "symmetric": weights.symmetric,
        "type": weights.type,
    }
    if weights.group is not None:
        arguments["group_size"] = weights.group
    if weights.block is not None:
        arguments["block_structure"] = list(weights.block)
    return arguments


def _activation_arguments(activations: ActivationScheme) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "dynamic": activations.dynamic,
        "num_bits": activations.bits,
        "strategy": activations.granularity,
        "symmetric": activations.symmetric,
        "type": activations.type,
    }
    if activations.group is not None:
        arguments["group_size"] = activations.group
    return arguments


def _refuse_transforms(config: Mapping[str, Any]) -> None:
    transforms, sparsity = config.get("transform_config") or {}, config.get("sparsity_config") or {}
    if transforms.get("config_groups"):
        raise FormatError("quantization_config.transform_config rotates activations at run time, which is not read")
    if sparsity.get("format") in _SPARSE or config.get("format") in _SPARSE:
        raise FormatError("the weights are stored sparse (2:4 or bitmask), which is not read; save them dense")


def _read_group(where: str, group: Any, config: Mapping[str, Any]) -> ConfigGroup:
    targets = group.get("targets") if isinstance(group, Mapping) else None
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
        raise FormatError(f"{where}.targets is missing")
    stored = group.get("format") or config.get("format")
    if stored not in _FORMATS:
        raise FormatError(f"{where}.format is {stored!r}; read are {', '.join(_FORMATS)}")
    if group.get("output_activations") is not None:
        raise FormatError(f"{where}.output_activations: rounded outputs are not read")
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise FormatError(f"{where}.weights is missing")
    try:
        return ConfigGroup(
            targets=tuple(targets),
            scheme=Scheme(
                weights=_read_weights(weights), activations=_read_activations(group.get("input_activations"))
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{where} cannot be read: {error}") from None


def _read_weights(arguments: Mapping[str, Any]) -> WeightScheme:
    """`actorder` is not looked at: columns that were permuted on disk are told by the tensor weight_g_idx."""
    strategy, group = _strategy(arguments), arguments.get("group_size")
    return WeightScheme(
        bits=int(arguments["num_bits"]),
        type=_type(arguments),
        group=int(str(group)) if strategy == "group" else None,
        block=_block(arguments.get("block_structure")) if strategy == "block" else None,
        per_tensor=strategy == "tensor",
        symmetric=bool(arguments.get("symmetric", True)),
    )


def _read_activations(arguments: Any) -> ActivationScheme | None:
    if arguments is None:
        return None
    strategy = _strategy(arguments)
    if strategy not in ("token", "tensor", "group"):
        raise ValueError(f"input_activations: the strategy {strategy!r} is not read")
    granularity: Literal["token", "tensor", "group"] = strategy
    return ActivationScheme(
        bits=int(arguments["num_bits"]),
        type=_type(arguments),
        granularity=granularity,
        group=int(arguments["group_size"]) if strategy == "group" else None,
        dynamic=arguments.get("dynamic", False) is True,
        symmetric=bool(arguments.get("symmetric", True)),
    )


def _strategy(arguments: Mapping[str, Any]) -> Any:
    """The strategy, or what the library takes for one where it is left out."""
    strategy, group = arguments.get("strategy"), arguments.get("group_size")
    if strategy is None:
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
        if strategy == "tensor" and arguments.get("dynamic") is True:
            strategy = "token"
    strategy = str(strategy).lower()
    if strategy not in ("tensor", "channel", "group", "block", "token"):
        raise ValueError(f"the strategy {strategy!r} is not read")
    return strategy


def _type(arguments: Mapping[str, Any]) -> Literal["int", "float"]:
    return "float" if str(arguments.get("type", "int")).lower() == "float" else "int"


def _block(value: Any) -> tuple[int, int]:
    """[128, 128], or "128x128" as releases before 0.10 wrote it."""
    parts = value.split("x") if isinstance(value, str) else value
    rows, columns = (int(part) for part in parts)
    return rows, columns
