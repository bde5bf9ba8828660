"""A transformers model one decoder block at a time: only the block at work holds weights, the rest stays on "meta".

Blocks and Linears are found by structure, so an architecture that transformers knows needs no line here.
Shapes: N samples, L tokens of a sample, D hidden size, I in_features.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.methods.base import InputStatistics


class UnsupportedModel(ValueError):
    """A model whose decoder blocks cannot be found or run here; the message says why."""


@dataclass(frozen=True)
class BlockCall:
    """The arguments that the model gives one block beside the hidden states (position embeddings, mask, ...)."""

    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)


class _Stop(Exception):
    """Ends a forward pass once what was wanted has been seen."""


class Skeleton:
    """The structure of the model in `reader`, with weights of fp32 brought in on request.

    Raises UnsupportedModel for a model type that transformers does not know as a causal language model, or one whose
    decoder blocks are not a ModuleList.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self.reader = reader
        self.model = _build(reader.folder)
        self.prefix, self.blocks = _find_blocks(self.model)

    def linears(self) -> dict[str, tuple[int, int]]:
        """(O, I) of every Linear of the model by module name, in the model's order."""
        return {
            name: (module.out_features, module.in_features)
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear)
        }

    def block_linears(self, index: int) -> dict[str, nn.Linear]:
        """The Linears of one block by full module name."""
        block = f"{self.prefix}.{index}"
        return {
            f"{block}.{name}": module
            for name, module in self.blocks[index].named_modules()
            if isinstance(module, nn.Linear)
        }

    @contextlib.contextmanager
    def loaded(self, index: int) -> Iterator[nn.Module]:
        """The block with its weights (fp32), released on leaving."""
        block = self.blocks[index]
        self._load(block, f"{self.prefix}.{index}")
        try:
            yield block
        finally:
            _release(block)

    @torch.inference_mode()
    def enter(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[BlockCall]]:
        """What reaches the first block for ids [N, L], as hidden states [N, L, D] fp32, and how each block is called.

        Samples are equally long and unpadded, so one call serves them all.
        """
        outside = self.model.base_model
        around = self._around_blocks(outside)
        for name, module in around.items():
            self._load(module, name)
        calls: list[BlockCall] = []
        hidden: list[torch.Tensor] = []

        def record(state: torch.Tensor, *positional: Any, **named: Any) -> torch.Tensor:
            calls.append(BlockCall(positional, named))
            if len(calls) == len(self.blocks):
                raise _Stop
            return state

        def catch(state: torch.Tensor, *positional: Any, **named: Any) -> torch.Tensor:
            hidden.append(state)
            raise _Stop

        with _replaced_forward(self.blocks, record), contextlib.suppress(_Stop):
            outside(input_ids=ids[:1], use_cache=False)
        with _replaced_forward(self.blocks[:1], catch):
            for sample in ids:
                with contextlib.suppress(_Stop):
                    outside(input_ids=sample.unsqueeze(0), use_cache=False)
        if len(calls) != len(self.blocks) or len(hidden) != len(ids):
            raise UnsupportedModel(f"{type(self.model).__name__}: its decoder blocks are not called one after another")
        for module in around.values():
            _release(module)
        return torch.cat(hidden), calls

    def _around_blocks(self, outside: nn.Module) -> dict[str, nn.Module]:
        """The modules of the base model that hold weights and stand outside the blocks (embedding, norm), by full name."""
        root = next(name for name, module in self.model.named_modules() if module is outside)
        return {
            name: module
            for name, module in self.model.named_modules()
            if name.startswith(root) and not name.startswith(f"{self.prefix}.") and not list(module.children())
        }

    def _load(self, module: nn.Module, prefix: str) -> None:
        names = list(module.state_dict())
        module.load_state_dict({name: self.reader.tensor(f"{prefix}.{name}").float() for name in names}, assign=True)


@torch.inference_mode()
def linear_sets(block: nn.Module, hidden: torch.Tensor, call: BlockCall) -> tuple[tuple[nn.Linear, ...], ...]:
    """The Linears of a block in the order they run, those that read the very same input together (q, k, v; gate, up).

    hidden [1, L, D]. A Linear that did not run on this sample stands alone, at the end.
    """
    seen: list[tuple[torch.Tensor, list[nn.Linear]]] = []

    def see(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(module, nn.Linear)
        for tensor, members in seen:
            if tensor is arguments[0]:
                members.append(module)
                return
        seen.append((arguments[0], [module]))

    linears = [module for module in block.modules() if isinstance(module, nn.Linear)]
    handles = [module.register_forward_pre_hook(see) for module in linears]
    try:
        run_block(block, hidden, call)
    finally:
        for handle in handles:
            handle.remove()
    sets = [tuple(members) for _, members in seen]
    ran = {module for members in sets for module in members}
    return (*sets, *((module,) for module in linears if module not in ran))


@torch.inference_mode()
def input_statistics(
    block: nn.Module, target: nn.Linear, hidden: Sequence[torch.Tensor], call: BlockCall
) -> InputStatistics:
    """Sum of x xᵀ over all tokens that reach `target`, for batches of hidden states; each pass ends there."""
    hessian = torch.zeros(target.in_features, target.in_features)
    absmax, total = torch.zeros(target.in_features), torch.zeros(target.in_features)
    tokens = 0

    def see(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        nonlocal tokens
        x = arguments[0].reshape(-1, target.in_features).float()
        hessian.addmm_(x.t(), x)
        magnitude = x.abs()
        torch.maximum(absmax, magnitude.amax(0), out=absmax)
        total.add_(magnitude.sum(0))
        tokens += x.shape[0]
        raise _Stop

    handle = target.register_forward_pre_hook(see)
    try:
        for batch in hidden:
            with contextlib.suppress(_Stop):
                run_block(block, batch, call)
    finally:
        handle.remove()
    return InputStatistics(hessian=hessian, tokens=tokens, absmax=absmax, absmean=total / max(tokens, 1))


@torch.inference_mode()
def run_block(block: nn.Module, hidden: torch.Tensor, call: BlockCall) -> torch.Tensor:
    """One block forward: hidden [N, L, D] -> [N, L, D]."""
    output = block(hidden, *call.positional, **call.named)
    result: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return result


def _release(module: nn.Module) -> None:
    module.load_state_dict({name: tensor.to("meta") for name, tensor in module.state_dict().items()}, assign=True)


def _build(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder)
        with _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModel(
            f"{folder}: transformers cannot build this model: {str(error).splitlines()[0]}"
        ) from None
    return model.eval().requires_grad_(False)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters made inside take no memory, while buffers (rotary frequencies, ...) are real.

    Under torch.device("meta") those buffers would be lost, since no checkpoint stores them.
    """
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The ModuleList that holds most of the Linears: the decoder blocks, with its module name."""
    best: tuple[int, str, nn.ModuleList] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            count = sum(isinstance(inner, nn.Linear) for inner in module.modules())
            if count and (best is None or count > best[0]):
                best = (count, name, module)
    if best is None:
        raise UnsupportedModel(f"{type(model).__name__}: has no list of decoder blocks with Linear layers")
    return best[1], best[2]


@contextlib.contextmanager
def _replaced_forward(blocks: Sequence[nn.Module] | nn.ModuleList, forward: Callable[..., Any]) -> Iterator[None]:
    for block in blocks:
        block.forward = forward
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
