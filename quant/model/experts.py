"""Experts that transformers holds fused in 3-D parameters, as the separate Linears that their files hold.

Shapes: E experts, T tokens, K experts a token, D hidden size, F inner size of an expert.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class UnknownExperts(ValueError):
    """Fused experts whose arithmetic is not down(act(gate(x)) * up(x)) with plain weights; the message says which."""


class Expert(nn.Module):
    """down(act(gate(x)) * up(x)) for x [T, D], with Linears under the names that `names` gives gate, up and down."""

    def __init__(self, hidden: int, inner: int, *, names: tuple[str, str, str], activation: nn.Module) -> None:
        super().__init__()
        self.names = names
        self.activation = activation
        for name, (rows, columns) in zip(names, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True):
            self.add_module(name, nn.Linear(columns, rows, bias=False, device="meta"))

    @property
    def parts(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        """gate, up, down."""
        gate, up, down = (self.get_submodule(name) for name in self.names)
        assert isinstance(gate, nn.Linear)
        assert isinstance(up, nn.Linear)
        assert isinstance(down, nn.Linear)
        return gate, up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, D] -> [T, D]."""
        gate, up, down = self.parts
        result: torch.Tensor = down(self.activation(gate(x)) * up(x))
        return result


class LinearExperts(nn.ModuleList):
    """Stands in for a fused experts module: the same call, the same sums in the same order.

    With `every_token` each expert also runs on the tokens that are not routed to it, for its Linears to be calibrated on
    all of them; what it puts out stays what routing says. All experts then read one tensor, and so share their statistics;
    `apart` gives each a copy, as if it had tokens of its own.
    """

    every_token = False
    apart = False

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [T, D], top_k_index and top_k_weights [T, K] -> [T, D]."""
        result = torch.zeros_like(hidden_states)
        for index, expert in enumerate(self):
            slot, token = torch.where((top_k_index == index).t())
            if self.every_token:
                states = expert(hidden_states.clone() if self.apart else hidden_states)[token]
            elif len(token):
                states = expert(hidden_states[token])
            else:
                continue
            result.index_add_(0, token, (states * top_k_weights[token, slot, None]).to(result.dtype))
        return result


@dataclass(frozen=True)
class FusedPart:
    """Where the weight of one expert's Linear lies in a file that holds all experts as one tensor: tensor[expert, rows]."""

    tensor: str
    expert: int
    rows: slice

    def take(self, fused: torch.Tensor) -> torch.Tensor:
        """The weight [O, I] out of the whole tensor [E, rows, I]."""
        return fused[self.expert, self.rows].contiguous()


def fused_experts(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The fused experts modules of a block by name. Raises UnknownExperts for any whose arithmetic is another."""
    for name, module in block.named_modules():
        own = {key: parameter for key, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3}
        if own:
            _check(name, module, own)
            yield name, module


def linearize(module: nn.Module, names: tuple[str, str, str]) -> LinearExperts:
    """Separate Linears (without weights: on "meta") in place of one fused module that `fused_experts` gave."""
    assert isinstance(module.gate_up_proj, nn.Parameter)
    experts, doubled, hidden = module.gate_up_proj.shape
    activation: Any = module.act_fn
    return LinearExperts([Expert(hidden, doubled // 2, names=names, activation=activation) for _ in range(experts)])


def fused_parts(stored: str, experts: int, inner: int, *, names: tuple[str, str, str]) -> dict[str, FusedPart]:
    """For the experts module stored as the tensors `stored`.gate_up_proj and .down_proj: each Linear's part, by its name."""
    gate, up, down = names
    parts = {}
    for index in range(experts):
        parts[f"{stored}.{index}.{gate}"] = FusedPart(f"{stored}.gate_up_proj", index, slice(0, inner))
        parts[f"{stored}.{index}.{up}"] = FusedPart(f"{stored}.gate_up_proj", index, slice(inner, 2 * inner))
        parts[f"{stored}.{index}.{down}"] = FusedPart(f"{stored}.down_proj", index, slice(None))
    return parts


def _check(name: str, module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    plain = set(parameters) == {"gate_up_proj", "down_proj"} == set(dict(module.named_parameters()))
    # What transformers says of a fused module; a release that does not say it knows only the plain kind.
    plain &= getattr(module, "has_gate", True) and getattr(module, "is_concatenated", True)
    plain &= not (getattr(module, "is_transposed", False) or getattr(module, "has_bias", False))
    plain &= not getattr(module, "has_post_expert_norm", False)
    gate = getattr(type(module), "_apply_gate", None)
    plain &= gate is None or gate.__module__ == "transformers.integrations.moe"
    if not plain or not hasattr(module, "act_fn"):
        raise UnknownExperts(
            f"{name}: experts of {type(module).__name__} ({', '.join(sorted(parameters))}) are not of the known kind"
        )
