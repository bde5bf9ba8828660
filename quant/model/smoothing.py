"""Where scale can be moved between what produces a Linear's inputs and the Linear, so that the block's function stays.

norm -> the Linears that read it; v -> o through attention; up -> down through the gate. Sites are found in a traced
forward pass by which tensors are the same, and each is tried before it is offered.
Shapes: L tokens, O out_features, I in_features, G kv heads, H query heads, D head size.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from narrowgauge.quant.methods.base import Site
from narrowgauge.quant.model.attention import Attended, attention_modules, watched_attention
from narrowgauge.quant.model.blocks import BlockCall, origin, router_modules, run_block
from narrowgauge.quant.model.experts import Expert, LinearExperts


@dataclass(frozen=True, eq=False, kw_only=True)
class SmoothingSite:
    """Input channels of `consumers` and what produces them: a norm (kind "norm") or rows of a Linear ("linear").

    routers: modules that read the same channels and stay at 16 bits; they are scaled along.
    normalized: a norm follows some consumer (q_norm, k_norm). The function stays all the same, but scales that are chosen by
    a Linear's own output overlook that norm, and AWQ is known to lose there (facts: llm-compressor#2522).
    """

    kind: Site
    name: str
    producer: nn.Module
    consumers: tuple[nn.Linear, ...]
    routers: tuple[nn.Module, ...] = ()
    normalized: bool = False
    offset: float = 0.0
    """What a norm adds to its weight: 1 where it multiplies by 1 + w (Gemma)."""
    rows: torch.Tensor | None = None
    """[I]: the producer's row that feeds each channel; None for a norm."""

    def tie(self, scales: torch.Tensor) -> torch.Tensor:
        """scales [I] > 0 with one common value, the geometric mean, for channels that one producer row feeds (GQA)."""
        if self.rows is None:
            return scales
        owners, index = torch.unique(self.rows, return_inverse=True)
        index, logs = index.to(scales.device), scales.double().log()
        total = torch.zeros(len(owners), dtype=torch.float64, device=scales.device).index_add_(0, index, logs)
        tied: torch.Tensor = (total / index.bincount())[index].exp().to(scales.dtype)
        return tied

    @torch.inference_mode()
    def apply(self, scales: torch.Tensor) -> None:
        """Divides the producer's channels by scales [I] (finite, > 0; tied here if they are not) and multiplies the columns.

        A norm is rounded to the dtype it is stored in, and the columns are multiplied by the rounded quotient, so that the
        function stays. Linears hold the result in the block's dtype: whoever stores one at 16 bits rounds it.
        """
        assert bool(((scales > 0) & torch.isfinite(scales)).all())
        scales = self.tie(scales.float().to(_parameter(self.producer, "weight").device))
        quotients = self._divide_norm(scales) if self.rows is None else self._divide_rows(self.rows, scales)
        for module in (*self.consumers, *self.routers):
            weight = _parameter(module, "weight")
            product = weight.float() * quotients
            if module in self.routers:
                product = product.to(origin(module).dtypes["weight"])
            weight.copy_(product)

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of the tensors that `apply` changes."""
        own = [name for name, _ in self.producer.named_parameters(recurse=False)]
        others = [f"{origin(module).name}.weight" for module in (*self.consumers, *self.routers)]
        return (*(f"{self.name}.{name}" for name in own), *others)

    def _divide_norm(self, scales: torch.Tensor) -> torch.Tensor:
        stored, weight = origin(self.producer).dtypes, _parameter(self.producer, "weight")
        before = weight.float() + self.offset
        rounded = (before / scales - self.offset).to(stored["weight"]).to(weight.dtype).float()
        quotients = before / (rounded + self.offset)
        # A channel that the norm sets to zero, or that rounding would, has no quotient and stays.
        usable = torch.isfinite(quotients) & (quotients > 0)
        weight.copy_(torch.where(usable, rounded, weight.float()))
        quotients = torch.where(usable, quotients, 1.0)
        bias = dict(self.producer.named_parameters(recurse=False)).get("bias")
        if bias is not None:
            bias.copy_((bias.float() / quotients).to(stored["bias"]))
        return quotients

    def _divide_rows(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        weight = _parameter(self.producer, "weight")
        divisors = torch.ones(len(weight), device=weight.device)
        divisors[rows.to(weight.device)] = scales
        weight.copy_(weight.float() / divisors.unsqueeze(1))
        bias = dict(self.producer.named_parameters(recurse=False)).get("bias")
        if bias is not None:
            bias.copy_(bias.float() / divisors)
        return scales


def sites(block: nn.Module, hidden: torch.Tensor, call: BlockCall) -> tuple[SmoothingSite, ...]:
    """The sites of a loaded block, tried on a short sample hidden [1, L, D] (Skeleton.probe gives one with its call).

    A site is offered only where scales leave what the block puts out as it was.
    """
    seen = _Trace(block, hidden, call)
    found = [*seen.norm_sites(), *seen.value_sites(), *seen.gated_sites()]

    def output() -> torch.Tensor:
        return run_block(block, hidden, call) - hidden

    if _keeps(found, output):
        return tuple(found)
    return tuple(site for site in found if _keeps([site], output))


@torch.inference_mode()
def _keeps(tried: Sequence[SmoothingSite], output: Callable[[], torch.Tensor]) -> bool:
    """Whether `output` stays with random scales at all of these sites; their tensors are put back.

    Scales are powers of two, which change no rounding: only a norm with an offset leaves more than the last digit.
    """
    before = output().float()
    tensors = [parameter for site in tried for parameter in _parameters(site)]
    copies = [parameter.clone() for parameter in tensors]
    generator = torch.Generator().manual_seed(0)
    try:
        for site in tried:
            width = site.consumers[0].in_features
            site.apply(torch.tensor([0.5, 1.0, 2.0])[torch.randint(0, 3, (width,), generator=generator)])
        after = output()
    finally:
        for parameter, copy in zip(reversed(tensors), reversed(copies), strict=True):
            parameter.copy_(copy)
    tolerance = 1e-3 if after.dtype == torch.float32 else 2**-4
    far = (after.float() - before).abs() > tolerance * (before.abs() + before.abs().mean())
    # Under half precision a few tokens may be routed to another expert.
    return bool(torch.isfinite(after).all()) and float(far.float().mean()) <= 0.05


class _Trace:
    """One forward pass: what every module was called with and put out, and what attention was given."""

    def __init__(self, block: nn.Module, hidden: torch.Tensor, call: BlockCall) -> None:
        self._block = block
        self._arguments: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._outputs: dict[nn.Module, Any] = {}
        self._attended: list[Attended] = []

        def see(module: nn.Module, *called: Any) -> None:
            arguments, named, self._outputs[module] = called
            self._arguments[module] = (arguments, named)

        with contextlib.ExitStack() as stack:
            for module in block.modules():
                stack.callback(module.register_forward_hook(see, with_kwargs=True).remove)
            stack.enter_context(watched_attention(block, self._attended.append))
            run_block(block, hidden, call)

    def norm_sites(self) -> Iterator[SmoothingSite]:
        """Norms whose output Linears (or a mixture of experts) read."""
        routers = router_modules(self._block)
        normalized = {module for module in self._linears() if self._norms_reading(self._outputs[module])}
        for norm in self._norms():
            readers = [module for module in self._arguments if self._reads(module, self._outputs[norm])]
            consumers = [module for module in readers if isinstance(module, nn.Linear) and module not in routers]
            for experts in [module for module in readers if isinstance(module, LinearExperts)]:
                for expert in experts:
                    assert isinstance(expert, Expert)
                    consumers += expert.parts[:2]
            offset = self._offset(norm)
            if consumers and offset is not None:
                yield SmoothingSite(
                    kind="norm",
                    name=origin(norm).name,
                    producer=norm,
                    consumers=tuple(consumers),
                    routers=tuple(module for module in routers if module in readers),
                    normalized=not normalized.isdisjoint(consumers),
                    offset=offset,
                )

    def value_sites(self) -> Iterator[SmoothingSite]:
        """Linears of which attention's values are a view, with the Linear that reads what attention made of them."""
        for attended in self._attended:
            value, (heads, size) = attended.value, attended.output.shape[2:]
            for producer in self._linears():
                rows = self._outputs[producer]
                if not _same_storage(rows, value) or value.shape[-1] != size or heads % value.shape[1]:
                    continue
                start = value.storage_offset() - rows.storage_offset()
                head = torch.arange(heads) // (heads // value.shape[1])
                index = start + head[:, None] * value.stride(1) + torch.arange(size) * value.stride(3)
                for consumer in self._linears():
                    if self._reads(consumer, attended.output) and consumer.in_features == index.numel():
                        yield _linear_site(producer, consumer, index.flatten())

    def gated_sites(self) -> Iterator[SmoothingSite]:
        """Linears of one module of which one (or half of one) multiplies the other's input: up and down."""
        attention = set(attention_modules(self._block))
        for parent in self._block.modules():
            if isinstance(parent, Expert):
                _, up, down = parent.parts
                yield _linear_site(up, down, torch.arange(down.in_features))
            elif parent in self._arguments and parent not in attention:
                linears = [child for child in parent.children() if isinstance(child, nn.Linear)]
                for consumer in [child for child in linears if child in self._arguments]:
                    if site := self._gated(parent, consumer, linears):
                        yield site

    def _gated(self, parent: nn.Module, consumer: nn.Linear, linears: Sequence[nn.Linear]) -> SmoothingSite | None:
        arguments, named = self._arguments[parent]

        def output() -> torch.Tensor:
            result = parent(*arguments, **named)
            tensor: torch.Tensor = result[0] if isinstance(result, tuple) else result
            return tensor

        width, order = consumer.in_features, list(self._arguments)
        for producer in linears:
            if producer not in self._arguments or order.index(producer) >= order.index(consumer):
                continue
            if producer.out_features not in (width, 2 * width):
                continue
            # Of a fused Linear the second half is up in all known models; the first is tried as well.
            for start in range(producer.out_features - width, -1, -width):
                site = _linear_site(producer, consumer, torch.arange(start, start + width))
                if _keeps([site], output):
                    return site
        return None

    def _linears(self) -> list[nn.Linear]:
        return [module for module in self._arguments if isinstance(module, nn.Linear)]

    def _norms(self) -> list[nn.Module]:
        return [module for module in self._arguments if _is_norm(module)]

    def _norms_reading(self, tensor: torch.Tensor) -> list[nn.Module]:
        return [norm for norm in self._norms() if self._reads(norm, tensor)]

    def _reads(self, module: nn.Module, tensor: torch.Tensor) -> bool:
        """Whether the module's first argument is `tensor`, reshaped at most."""
        arguments, named = self._arguments[module]
        given = arguments[0] if arguments else next(iter(named.values()), None)
        return isinstance(given, torch.Tensor) and _same_storage(given, tensor) and given.numel() == tensor.numel()

    @torch.inference_mode()
    def _offset(self, norm: nn.Module) -> float | None:
        """0 for w · x, 1 for (1 + w) · x, None for another norm: by which weight makes it put out its bias alone."""
        arguments, named = self._arguments[norm]
        weight = _parameter(norm, "weight")
        bias = dict(norm.named_parameters(recurse=False)).get("bias")
        before = weight.clone()
        try:
            for offset in (0.0, 1.0):
                weight.fill_(-offset)
                output = norm(*arguments, **named)
                if torch.equal(output, torch.zeros_like(output) if bias is None else bias.expand_as(output)):
                    return offset
        finally:
            weight.copy_(before)
        return None


def _linear_site(producer: nn.Linear, consumer: nn.Linear, rows: torch.Tensor) -> SmoothingSite:
    name = origin(producer).name
    return SmoothingSite(kind="linear", name=name, producer=producer, consumers=(consumer,), rows=rows)


def _parameters(site: SmoothingSite) -> Iterator[torch.Tensor]:
    yield from site.producer.parameters(recurse=False)
    for module in (*site.consumers, *site.routers):
        yield _parameter(module, "weight")


def _parameter(module: nn.Module, name: str) -> torch.Tensor:
    parameter = getattr(module, name)
    assert isinstance(parameter, torch.Tensor)
    return parameter


def _is_norm(module: nn.Module) -> bool:
    own = dict(module.named_parameters())
    return set(own) in ({"weight"}, {"weight", "bias"}) and own["weight"].ndim == 1


def _same_storage(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
