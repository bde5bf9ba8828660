"""Which Linears serving engines run as one matrix product: they need one Scheme, and are allotted bits together.

vLLM stacks q, k, v and gate, up, and all experts of a layer; it refuses a checkpoint that quantizes some of a stack and
not others, or whose schemes differ. Its tables go by name (`packed_modules_mapping` of each model), so this one does too.
"""

import re
from collections.abc import Iterable, Mapping

from narrowgauge.quant.formats.scheme import Scheme

_STACKED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
_STACK_OF = {name: stack for stack in _STACKED for name in stack}
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def unit_of(name: str) -> str:
    """The name of the unit a Linear belongs to: "model.layers.0.self_attn.{q_proj,k_proj,v_proj}", or its own.

    The experts of a layer are one unit for what goes in and one for what comes out: "...experts.*.{gate_proj,up_proj}".
    """
    parent, _, own = name.rpartition(".")
    parent = re.sub(r"\.experts\.\d+$", ".experts.*", parent)
    stack = _STACK_OF.get(own)
    return f"{parent}.{own}" if stack is None else f"{parent}.{{{','.join(stack)}}}"


def units(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The Linears of each unit, both in the order in which they come."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(unit_of(name), []).append(name)
    return {unit: tuple(members) for unit, members in found.items()}


def split_units(schemes: Mapping[str, Scheme | None]) -> tuple[str, ...]:
    """One sentence for each kind of unit whose members differ (None: full precision); layers that differ alike count once."""
    alike: dict[tuple[str, str], int] = {}
    for unit, members in units(schemes).items():
        if len({schemes[member] for member in members}) > 1:
            said = {_own(member): _name(schemes[member]) for member in members}
            how = ", ".join(f"{own} {scheme}" for own, scheme in said.items())
            kind = _NUMBER.sub(".*", unit)
            alike[kind, how] = alike.get((kind, how), 0) + 1
    return tuple(
        f"{unit} differ ({how}) in {count} {'layer' if count == 1 else 'layers'}: vLLM runs them as one and will refuse the "
        "checkpoint; narrowgauge and transformers load it"
        for (unit, how), count in alike.items()
    )


def _own(name: str) -> str:
    return name.rpartition(".")[2]


def _name(scheme: Scheme | None) -> str:
    if scheme is None:
        return "16 bits"
    return f"{scheme.name} g{scheme.weights.group}" if scheme.weights.group else scheme.name
