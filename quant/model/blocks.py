"""A transformers model one decoder block at a time: only the block at work holds weights, the rest stays on "meta".

Blocks and Linears are found by structure, so an architecture that transformers knows needs no line here. All names are
those of the checkpoint's files, where transformers may give a module another (see architectures.py, experts.py).
Shapes: N samples, L tokens of a sample, D hidden size, O out_features, I in_features, G kv heads.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.model.architectures import architecture, attention_implementation
from narrowgauge.quant.model.attention import attention_modules, kv_heads
from narrowgauge.quant.model.experts import (
    Expert,
    FusedPart,
    LinearExperts,
    UnknownExperts,
    fused_experts,
    fused_parts,
    linearize,
)

_PROBE_TOKENS = 16


class UnsupportedModel(ValueError):
    """A model whose decoder blocks cannot be found or run here; the message says why."""


@dataclass(frozen=True)
class BlockCall:
    """The arguments that the model gives one block beside the hidden states (position embeddings, mask, ...)."""

    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AttentionPart:
    """The attention of one block: its module name, and how many heads of keys and values it has."""

    name: str
    kv_heads: int


@dataclass(frozen=True)
class Origin:
    """Where a module of a loaded block comes from: its name in the files, and the dtype of each tensor there."""

    name: str
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)


class _Stop(Exception):
    """Ends a forward pass once what was wanted has been seen."""


class Skeleton:
    """The structure of the model in `reader`; blocks get their weights on request, in `dtype` on `device`.

    With `all_experts` every expert of a mixture runs on all tokens (what it puts out stays what routing says), so that its
    Linears are calibrated on all of them; their gates and ups then share one input. Raises UnsupportedModel for a model type
    that transformers does not know as a causal language model, or one whose blocks or experts are not of a known kind.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        *,
        device: torch.device = torch.device("cpu"),  # noqa: B008
        dtype: torch.dtype = torch.float32,
        all_experts: bool = False,
    ) -> None:
        self.reader = reader
        self.device = device
        self.dtype = dtype
        self.model = _build(reader.folder)
        self._row = architecture(str(getattr(self.model.config, "model_type", "")))
        self._renames = [(ours, disk) for ours, disk in self._row.renames if any(disk in n for n in reader.names())]
        self._parts: dict[str, FusedPart] = {}
        self._probe_calls: list[BlockCall] | None = None
        self.prefix, self.blocks = _find_blocks(self.model)
        for index, block in enumerate(self.blocks):
            self._separate_experts(index, block, all_experts)
            for name, module in block.named_modules():
                _tag(
                    module, Origin(self._stored(f"{self.prefix}.{index}.{name}" if name else f"{self.prefix}.{index}"))
                )

    def linears(self) -> dict[str, tuple[int, int]]:
        """(O, I) of every Linear of the model by module name, in the model's order."""
        return {
            self._stored(name): (module.out_features, module.in_features)
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear)
        }

    def block_linears(self, index: int) -> dict[str, nn.Linear]:
        """The Linears of one block by full module name, those of its experts included."""
        return {origin(module).name: module for module in self.blocks[index].modules() if isinstance(module, nn.Linear)}

    def routers(self) -> tuple[str, ...]:
        """Names of all that weighs experts (routers, gates of shared experts): they stay at 16 bits unless a rule names
        them. Some are Linears, some are other modules that engines build as Linears: files must list both as kept."""
        return tuple(origin(module).name for block in self.blocks for module in router_modules(block))

    def weight(self, name: str) -> torch.Tensor:
        """The weight [O, I] of the Linear `name` as the files have it, dequantized where they hold codes.

        Raises FormatError where it is not stored.
        """
        if name in self._parts:
            part = self._parts[name]
            return part.take(self.reader.tensor(part.tensor))
        if self.reader.layout is not None and name in self.reader.layout.linears:
            return self.reader.weight(name, self.dtype)
        return self.reader.tensor(f"{name}.weight")

    def source(self, name: str) -> str:
        """The stored tensor that holds the weight of the Linear `name`: its own, or one that all experts share."""
        return self._parts[name].tensor if name in self._parts else f"{name}.weight"

    def attention(self, index: int) -> AttentionPart | None:
        """The attention of one block, None where it keeps no keys and values by head."""
        for module in attention_modules(self.blocks[index]):
            return AttentionPart(name=origin(module).name, kv_heads=kv_heads(module))
        return None

    @contextlib.contextmanager
    def loaded(self, index: int) -> Iterator[nn.Module]:
        """The block with its weights, released on leaving."""
        block = self.blocks[index]
        try:
            self._load(block, f"{self.prefix}.{index}")
            yield block
        finally:
            _release(block)

    @torch.inference_mode()
    def calls(self, length: int) -> list[BlockCall]:
        """How the model calls each block for samples of `length` tokens, all of them unpadded.

        Raises UnsupportedModel where the blocks do not run one after another, or are given what depends on the tokens.
        """
        ids = torch.zeros(1, length, dtype=torch.long, device=self.device)
        with self._around_loaded():
            first, second = self._record(ids), self._record(ids + 1)
        if not _equal([first], [second]):
            raise UnsupportedModel(f"{type(self.model).__name__}: its decoder blocks are given more than hidden states")
        return first

    def probe(self, index: int) -> tuple[torch.Tensor, BlockCall]:
        """A short sample [1, 16, D] of random hidden states and its call, for looking at how one block is built."""
        if self._probe_calls is None:
            self._probe_calls = self.calls(_PROBE_TOKENS)
        width = self.model.config.get_text_config().hidden_size
        hidden = torch.randn(1, _PROBE_TOKENS, width, generator=torch.Generator().manual_seed(index))
        return hidden.to(self.device, self.dtype), self._probe_calls[index]

    @torch.inference_mode()
    def enter(self, ids: torch.Tensor, *, batch: int = 1) -> Iterator[torch.Tensor]:
        """What reaches the first block for ids [N, L]: hidden states [batch, L, D] on the device, batch after batch."""
        caught: list[torch.Tensor] = []

        def catch(state: torch.Tensor, *positional: Any, **named: Any) -> torch.Tensor:
            caught.append(state)
            raise _Stop

        with self._around_loaded(), _replaced_forward([self.blocks[0]], [catch]):
            for samples in torch.split(ids, batch):
                with contextlib.suppress(_Stop):
                    self.model.base_model(input_ids=samples.to(self.device), use_cache=False)
                yield caught.pop()

    @contextlib.contextmanager
    def head(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """What makes logits [N, L, V] fp32 of what the last block puts out [N, L, D]: the model's own code behind it."""
        output = self.model.get_output_embeddings()
        name = next(name for name, module in self.model.named_modules() if module is output)

        @torch.inference_mode()
        def logits(hidden: torch.Tensor) -> torch.Tensor:
            ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=self.device)
            # All blocks stand aside: the first hands `hidden` on in place of the embedding, the others what they get.
            first = [lambda *_, **__: hidden]
            others = [lambda state, *_, **__: state] * (len(self.blocks) - 1)
            with _replaced_forward(self.blocks, [*first, *others]):
                result: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
            return result.float()

        with self._around_loaded():
            if self.reader.has(f"{name}.weight"):
                self._load(output, name)
            else:  # tied: the embedding's own weight
                output.load_state_dict({"weight": self.model.get_input_embeddings().weight}, assign=True)
            try:
                yield logits
            finally:
                _release(output)

    def _record(self, ids: torch.Tensor) -> list[BlockCall]:
        calls: list[BlockCall] = []

        def recorder(index: int) -> Callable[..., torch.Tensor]:
            def record(state: torch.Tensor, *positional: Any, **named: Any) -> torch.Tensor:
                if index != len(calls):
                    raise UnsupportedModel(
                        f"{type(self.model).__name__}: its decoder blocks are not called one after another"
                    )
                calls.append(BlockCall(positional, named))
                if len(calls) == len(self.blocks):
                    raise _Stop
                return state

            return record

        with (
            _replaced_forward(self.blocks, [recorder(index) for index in range(len(self.blocks))]),
            contextlib.suppress(_Stop),
        ):
            self.model.base_model(input_ids=ids, use_cache=False)
        if len(calls) != len(self.blocks):
            raise UnsupportedModel(f"{type(self.model).__name__}: does not call all of its decoder blocks")
        return calls

    @contextlib.contextmanager
    def _around_loaded(self) -> Iterator[None]:
        """The modules of the base model that stand outside the blocks (embedding, rotary tables, norm), with weights."""
        base = self.model.base_model
        root = next(name for name, module in self.model.named_modules() if module is base)
        around = {
            name: module
            for name, module in self.model.named_modules()
            if name.startswith(root) and not name.startswith(f"{self.prefix}.") and not list(module.children())
        }
        try:
            for name, module in around.items():
                self._load(module, name)
            yield
        finally:
            for module in around.values():
                _release(module)

    def _stored(self, name: str) -> str:
        for ours, disk in self._renames:
            name = f"{name}.".replace(ours, disk).removesuffix(".")
        return name

    def _separate_experts(self, index: int, block: nn.Module, all_experts: bool) -> None:
        try:
            fused = list(fused_experts(block))
        except UnknownExperts as error:
            raise UnsupportedModel(f"{self.prefix}.{index}.{error}") from None
        for name, module in fused:
            experts = linearize(module, self._row.experts)
            experts.every_token = all_experts
            block.set_submodule(name, experts)
            stored = self._stored(f"{self.prefix}.{index}.{name}")
            if self.reader.has(f"{stored}.gate_up_proj"):
                first = experts[0]
                assert isinstance(first, Expert)
                inner = first.parts[0].out_features
                self._parts |= fused_parts(stored, len(experts), inner, names=self._row.experts)

    def _load(self, module: nn.Module, prefix: str) -> None:
        tensors = {}
        for name in module.state_dict():
            owner, _, local = name.rpartition(".")
            stored = self._stored(f"{prefix}.{owner}" if owner else prefix)
            tensor = self.weight(stored) if local == "weight" else self.reader.tensor(f"{stored}.{local}")
            found = getattr(module.get_submodule(owner), "origin", None)
            if isinstance(found, Origin):
                found.dtypes[local] = tensor.dtype
            tensors[name] = tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)
        module.load_state_dict(tensors, assign=True)
        for inner in module.modules():
            for name, buffer in inner.named_buffers(recurse=False):
                setattr(inner, name, buffer.to(self.device))


def origin(module: nn.Module) -> Origin:
    """Where a module inside a Skeleton's block comes from."""
    found = getattr(module, "origin", None)
    assert isinstance(found, Origin), f"{type(module).__name__} stands in no Skeleton's block"
    return found


def router_modules(block: nn.Module) -> list[nn.Module]:
    """Beside each mixture of experts: the modules that give one weight an expert, or one a token (a shared expert's)."""
    found = []
    for parent in block.modules():
        for experts in [child for child in parent.children() if isinstance(child, LinearExperts)]:
            for child in parent.children():
                weight = dict(child.named_parameters(recurse=False)).get("weight")
                if weight is not None and weight.ndim == 2 and weight.shape[0] in (1, len(experts)):
                    found.append(child)
    return found


@torch.inference_mode()
def run_block(block: nn.Module, hidden: torch.Tensor, call: BlockCall) -> torch.Tensor:
    """One block forward: hidden [N, L, D] -> [N, L, D]."""
    output = block(hidden, *call.positional, **call.named)
    result: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return result


def _tag(module: nn.Module, value: Origin) -> None:
    module.origin = value  # type: ignore[assignment]


def _release(module: nn.Module) -> None:
    module.load_state_dict({name: tensor.to("meta") for name, tensor in module.state_dict().items()}, assign=True)


def _equal(one: Any, other: Any) -> bool:
    """Whether two calls hold the same: tensors by value, what is not a container or tensor by ==."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, BlockCall):
        return _equal([one.positional, one.named], [other.positional, other.named])
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other)


def _build(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder)
        with _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention_implementation(config), dtype=torch.float32
            )
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
def _replaced_forward(
    blocks: Sequence[nn.Module] | nn.ModuleList, forwards: Sequence[Callable[..., Any]]
) -> Iterator[None]:
    for block, forward in zip(blocks, forwards, strict=True):
        block.forward = forward
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
