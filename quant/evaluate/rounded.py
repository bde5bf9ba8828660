"""Makes transformers' modules round what a checkpoint's schemes say: inputs of Linears, stored keys and values.

Rounding itself is defined in formats/rounding.py. Shapes: I in_features, G kv heads.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from narrowgauge.kernels.hardware import resolve_device
from narrowgauge.quant.formats.base import KVScales
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.rounding import round_activations, round_kv
from narrowgauge.quant.formats.scheme import ActivationScheme, KVCacheScheme, Scheme
from narrowgauge.quant.model.architectures import architecture
from narrowgauge.quant.model.experts import Expert, LinearExperts, fused_experts, linearize

_PREFIX = "narrowgauge_rounded_"
"""Before the name of the attention implementation that rounded keys and values are handed on to."""


class ReferenceModelError(ValueError):
    """A checkpoint or a window that the reference modules cannot run; the message says why."""


def find_device(name: str) -> torch.device:
    """The device of that name ("auto": a GPU where there is one). Raises ReferenceModelError for one that is not here."""
    try:
        device = resolve_device(name)
    except ValueError as error:
        raise ReferenceModelError(f"device {name!r}: {error}") from None
    if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
        raise ReferenceModelError(
            f"device {name!r}: torch sees {torch.cuda.device_count()} CUDA devices; use cpu or auto"
        )
    return device


@dataclass(frozen=True)
class KVRounding:
    """What an attention module does to keys and values; `seen` holds the names of those that really did."""

    name: str
    scheme: KVCacheScheme
    scales: KVScales
    seen: set[str] = field(default_factory=set)


def rounded_inputs(reader: CheckpointReader) -> dict[str, Scheme]:
    """The Linears of a checkpoint whose input is rounded, by stored name."""
    linears = reader.layout.linears if reader.layout else {}
    return {name: scheme for name, scheme in linears.items() if scheme.activations is not None}


def round_inputs(linears: Mapping[str, nn.Linear], reader: CheckpointReader, *, device: torch.device) -> None:
    """Hangs a hook before each of `linears` (by stored name) whose scheme rounds its input.

    A static scale is read from the file. Raises ReferenceModelError where one is missing or a group does not fit.
    """
    for name, scheme in rounded_inputs(reader).items():
        if name not in linears:
            continue
        activations, module = scheme.activations, linears[name]
        assert activations is not None
        if activations.group is not None and module.in_features % activations.group:
            raise ReferenceModelError(
                f"{reader.folder}: {name}: its input of {module.in_features} columns is rounded in groups of "
                f"{activations.group}, which do not divide it; no loader agrees what the last group is"
            )
        scale = None if activations.dynamic else _input_scale(reader, name)
        module.register_forward_pre_hook(_input_hook(activations, None if scale is None else scale.to(device)))


def round_keys_and_values(
    attentions: Mapping[str, nn.Module], reader: CheckpointReader, *, device: torch.device
) -> tuple[KVRounding, ...]:
    """Rounds what `attentions` (by stored name) are given as keys (after the rotary embedding) and values.

    Works through transformers' attention interface: the configuration that the modules share is pointed at a function that
    rounds and hands on to the implementation named before. Attention modules for which the file holds no scales are refused
    by ReferenceModelError.
    """
    layout = reader.layout
    if layout is None or layout.kv_cache is None:
        return ()
    roundings = []
    modules: Mapping[str, Any] = attentions
    for name, module in modules.items():
        scales = reader.kv_scales(name)
        if scales is None:
            raise ReferenceModelError(
                f"{reader.folder}: {name}: config.json quantizes keys and values ({layout.kv_cache.name}), but no scale "
                "of them is stored; calibrate again"
            )
        moved = KVScales(key=scales.key.to(device), value=scales.value.to(device))
        roundings.append(KVRounding(name=name, scheme=layout.kv_cache, scales=moved))
        module.kv_rounding = roundings[-1]
        inner = str(module.config._attn_implementation)
        if not inner.startswith(_PREFIX):
            module.config._attn_implementation = _register(inner)
    return tuple(roundings)


def by_stored_name(model: Any, wanted: Callable[[nn.Module], bool], reader: CheckpointReader) -> dict[str, nn.Module]:
    """The modules of a model that are `wanted`, by the names that they have in the files."""
    rows = architecture(str(model.config.model_type)).renames
    renames = [(ours, disk) for ours, disk in rows if any(disk in stored for stored in reader.names())]
    found = {}
    for name, module in model.named_modules():
        if wanted(module):
            for ours, disk in renames:
                name = f"{name}.".replace(ours, disk).removesuffix(".")
            found[name] = module
    return found


def separate_experts(model: Any) -> None:
    """Puts one Linear for each projection of each expert in place of experts that transformers holds fused.

    Their inputs can be rounded one by one then. The weights are views of the fused ones.
    """
    names = architecture(str(model.config.model_type)).experts
    for name, fused in list(fused_experts(model)):
        experts = linearize(fused, names)
        _share(fused, experts)
        model.set_submodule(name, experts)


def _share(fused: Any, experts: LinearExperts) -> None:
    for index, expert in enumerate(experts):
        assert isinstance(expert, Expert)
        gate, up, down = expert.parts
        first, second = fused.gate_up_proj[index].detach().chunk(2)
        for linear, weight in ((gate, first), (up, second), (down, fused.down_proj[index].detach())):
            linear.weight = nn.Parameter(weight, requires_grad=False)


def _input_scale(reader: CheckpointReader, name: str) -> torch.Tensor:
    scale = reader.unpack(name).input_scale
    if scale is None or not bool(torch.isfinite(scale).all()) or not bool((scale.float() > 0).all()):
        stored = "is not stored" if scale is None else f"is {scale.flatten().tolist()}, not finite and above zero"
        raise ReferenceModelError(f"{reader.folder}: {name}: the static scale of its input {stored}; calibrate again")
    return scale


def _input_hook(scheme: ActivationScheme, scale: torch.Tensor | None) -> Callable[..., tuple[Any, ...]]:
    def round_first(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (round_activations(arguments[0], scheme, scale), *arguments[1:])

    return round_first


def _register(inner: str) -> str:
    """The name under which transformers finds `inner` with rounding before it."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    def attend(module: Any, query: torch.Tensor, *others: Any, **named: Any) -> Any:
        key, value, *rest = others
        rounding = module.kv_rounding
        rounding.seen.add(rounding.name)
        _check_heads(rounding, key.shape[1])
        key = round_kv(key, rounding.scheme, rounding.scales.key)
        value = round_kv(value, rounding.scheme, rounding.scales.value)
        # "eager" is a function of the model's own file: soft caps and sinks stand there.
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        return ALL_ATTENTION_FUNCTIONS.get_interface(inner, eager)(module, query, key, value, *rest, **named)

    name = f"{_PREFIX}{inner}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[inner])
    return name


def _check_heads(rounding: KVRounding, heads: int) -> None:
    for scale in (rounding.scales.key, rounding.scales.value):
        if rounding.scheme.granularity == "head" and scale.numel() != heads:
            raise ReferenceModelError(f"{rounding.name}: has {heads} kv heads, but {scale.numel()} scales are stored")
