"""Runs one loaded block over many batches while its Linears are rounded one set after another.

A true-sequential run asks for the inputs of q, k, v; of o once those are rounded; of gate, up; of down; and for the
block's output. Recomputed from the block's start each time that is four forward passes. Where a module's output is the
output of its last Linear (attention and o, MLP and down, an expert and its down), that Linear's input is kept once
nothing before it changes any more, and later passes skip the module.
Shapes: N samples, L tokens of a sample, D hidden size, I in_features, T tokens.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from narrowgauge.quant.methods.base import InputStatistics
from narrowgauge.quant.model.blocks import BlockCall, origin, run_block
from narrowgauge.quant.model.experts import LinearExperts
from narrowgauge.quant.model.inputs import InputSums, Need

LinearSet = tuple[nn.Linear, ...]
_Entry = tuple[Hashable, nn.Linear]
_Kind = Literal["input", "output"]

_PROBE = object()


class _Stop(Exception):
    """Ends a forward pass once what was wanted has been seen."""


@dataclass(frozen=True)
class _Cut:
    """A module whose output is that of its Linear `last`; `wrapped`: as the first of a tuple, the rest unused."""

    last: nn.Linear
    module: nn.Module
    wrapped: int

    def output(self, tensor: torch.Tensor) -> Any:
        return (tensor, *[None] * (self.wrapped - 1)) if self.wrapped else tensor


class BlockRunner:
    """Passes over one loaded block.

    `sets`: the Linears in the order they run, those that read the very same tensor together (q, k, v; gate, up).
    `stages`: the sets by what they depend on: none feeds another of its stage, so one pass serves a whole stage. A Linear
    that never runs stands in the last stage, alone in its set.
    `probe` is a short sample and its call (Skeleton.probe). Up to `cache_bytes` of activations are kept between passes.
    """

    def __init__(
        self, block: nn.Module, call: BlockCall, probe: tuple[torch.Tensor, BlockCall], *, cache_bytes: int = 0
    ) -> None:
        self.block = block
        self.call = call
        trace = _Trace(block, *probe)
        self.sets = trace.sets()
        self.stages = trace.stages(self.sets)
        self._stage_of = {linear: at for at, stage in enumerate(self.stages) for members in stage for linear in members}
        self._once = trace.once
        self._settled: set[nn.Linear] = set()
        self._free = cache_bytes
        self._kept: dict[_Entry, tuple[_Kind, torch.Tensor]] = {}
        self._cuts = trace.cuts()
        if not self._cuts_hold(probe, trace.inputs):
            self._cuts = ()

    def collect(
        self, targets: Sequence[nn.Linear], *, needs: Collection[Need] = frozenset({"hessian"})
    ) -> "InputCollector":
        """A collector of what reaches `targets`, for as many of them as one pass may serve."""
        return InputCollector(self, targets, frozenset(needs))

    def settle(self, linears: Sequence[nn.Linear]) -> None:
        """Says that these Linears (rounded, or kept as they are) will not change any more, nor the norms before them.

        Only with all Linears of the stages before it settled is a Linear's input kept for later passes.
        """
        self._settled.update(linears)

    def output(self, hidden: torch.Tensor, *, key: Hashable = None) -> torch.Tensor:
        """What the block makes of hidden [N, L, D]: [N, L, D]. What was kept under `key` is given up."""
        result = self._pass(hidden, key, ())[0]
        assert result is not None
        if key is not None:
            self.forget(key)
        return result

    def forget(self, key: Hashable = None) -> None:
        """Gives up what is kept under `key`; with None, all of it (as before a batch is run again in halves)."""
        for entry in [entry for entry in self._kept if key is None or entry[0] == key]:
            self._drop(entry)

    @torch.inference_mode()
    def inputs(
        self, targets: Collection[nn.Linear], hidden: torch.Tensor, *, key: Hashable = None
    ) -> dict[nn.Linear, list[torch.Tensor]]:
        """What each of `targets` is called with for hidden [N, L, D], [..., I] a call; nothing where it is not reached.

        `key` stands for these very samples: equal keys must mean equal `hidden`; None keeps nothing for later.
        """
        return self._pass(hidden, key, targets)[1]

    @torch.inference_mode()
    def _pass(
        self, hidden: torch.Tensor, key: Hashable, targets: Collection[nn.Linear]
    ) -> tuple[torch.Tensor | None, dict[nn.Linear, list[torch.Tensor]]]:
        seen: dict[nn.Linear, list[torch.Tensor]] = {}

        def see(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            assert isinstance(module, nn.Linear)
            seen.setdefault(module, []).append(arguments[0])
            if len(seen) == len(targets) and self._once.issuperset(targets):
                raise _Stop

        changing = min((at for linear, at in self._stage_of.items() if linear not in self._settled), default=math.inf)
        with contextlib.ExitStack() as stack:
            if key is not None:
                for cut in self._cuts:
                    ready = changing >= self._stage_of[cut.last]
                    stack.enter_context(self._shortened(cut, key, targets, ready=ready))
            for target in targets:
                stack.callback(target.register_forward_pre_hook(see).remove)
            try:
                return run_block(self.block, hidden, self.call), seen
            except _Stop:
                return None, seen

    @contextlib.contextmanager
    def _shortened(self, cut: _Cut, key: Hashable, targets: Collection[nn.Linear], *, ready: bool) -> Iterator[None]:
        """Puts what is kept in place of `cut`'s module; where there is nothing and nothing before its Linear changes any
        more (`ready`), keeps what passes by."""
        last = cut.last
        kind, tensor = self._kept.get((key, last), (None, None))
        inside = any(module in targets for module in cut.module.modules() if module is not last)
        if inside or (kind == "output" and last in targets):
            yield
        elif tensor is not None:
            with _replaced(cut.module, lambda *_, **__: cut.output(self._resume(cut, key))):
                yield
        else:
            handles = []
            if ready and last in self._settled:
                handles.append(last.register_forward_hook(lambda _, __, out: self._keep((key, last), "output", out)))
            elif ready:
                handles.append(last.register_forward_pre_hook(lambda _, x: self._keep((key, last), "input", x[0])))
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def _resume(self, cut: _Cut, key: Hashable) -> torch.Tensor:
        kind, tensor = self._kept[key, cut.last]
        if kind == "output":
            return tensor
        result: torch.Tensor = cut.last(tensor)
        if cut.last in self._settled:
            self._drop((key, cut.last))
            self._keep((key, cut.last), "output", result)
        return result

    def _cuts_hold(self, probe: tuple[torch.Tensor, BlockCall], inputs: dict[nn.Linear, list[torch.Tensor]]) -> bool:
        """Whether shortened passes, from kept inputs and from kept outputs, give the very same, each of them twice."""
        hidden, call = probe
        real, self.call = (self.call, self._free), call
        self._free = sum(inputs[cut.last][0].nbytes for cut in self._cuts) * 64
        try:
            with everywhere(self.block):
                plain = self._pass(hidden, None, ())[0]
                assert plain is not None
                for cut in self._cuts:
                    self._keep((_PROBE, cut.last), "input", inputs[cut.last][0])
                passes = [self._pass(hidden, _PROBE, ())[0] for _ in range(2)]
                self._settled.update(self._stage_of)
                passes += [self._pass(hidden, _PROBE, ())[0] for _ in range(3)]
                return all(shortened is not None and torch.equal(shortened, plain) for shortened in passes)
        finally:
            self._settled.clear()
            self._kept.clear()
            self.call, self._free = real

    def _keep(self, entry: _Entry, kind: _Kind, tensor: torch.Tensor) -> None:
        if tensor.nbytes <= self._free:
            self._free -= tensor.nbytes
            self._kept[entry] = (kind, tensor)

    def _drop(self, entry: _Entry) -> None:
        self._free += self._kept.pop(entry)[1].nbytes


def linear_sets(block: nn.Module, hidden: torch.Tensor, call: BlockCall) -> tuple[LinearSet, ...]:
    """The Linears of a block in the order they run, those that read the very same input together (q, k, v; gate, up).

    hidden [1, L, D]. A Linear that does not run stands alone, at the end. BlockRunner.stages says which need one another.
    """
    return _Trace(block, hidden, call).sets()


class InputCollector:
    """Sums over what reaches some Linears of a block, batch after batch. Targets of one set share their sums."""

    def __init__(self, runner: BlockRunner, targets: Sequence[nn.Linear], needs: frozenset[Need]) -> None:
        self._runner = runner
        first = {member: members[0] for members in runner.sets for member in members}
        self._sums: dict[nn.Linear, InputSums] = {}
        self._read: dict[nn.Linear, nn.Linear] = {}
        for target in targets:
            speaker = next((read for read in self._read.values() if first[read] is first[target]), target)
            self._read[target] = speaker
            self._sums.setdefault(speaker, InputSums(target.in_features, target.weight.device, needs))

    def add(self, hidden: torch.Tensor, *, key: Hashable = None, heldout: bool = False) -> None:
        """Runs hidden [N, L, D] as far as needed. `heldout`: counts for the held-out Hessian only.

        Where memory runs out in the pass nothing has been added, and the samples may be given again in smaller batches.
        """
        seen = self._runner.inputs(self._sums.keys(), hidden, key=key)
        for target, calls in seen.items():
            for x in calls:
                self._sums[target].add(x.reshape(-1, target.in_features), heldout=heldout)

    def statistics(self) -> dict[nn.Linear, InputStatistics]:
        """What was collected. Raises InputsNotFinite with the name of the first Linear that NaN or infinity reached."""
        found = {speaker: sums.statistics(origin(speaker).name) for speaker, sums in self._sums.items()}
        return {target: found[speaker] for target, speaker in self._read.items()}


class _Trace:
    """What one pass of a short sample shows: which tensors the Linears read and write, and which modules hand on."""

    def __init__(self, block: nn.Module, hidden: torch.Tensor, call: BlockCall) -> None:
        self._block, self._hidden, self._call = block, hidden, call
        self._linears = [module for module in block.modules() if isinstance(module, nn.Linear)]
        self._outputs: dict[nn.Module, Any] = {}
        self.inputs = self._run(frozenset(), outputs=self._outputs)
        self.once = self._once()

    def _once(self) -> frozenset[nn.Linear]:
        """The Linears that every pass calls exactly once, so that a pass may end when all targets have been seen."""
        mixtures = [module for module in self._block.modules() if isinstance(module, LinearExperts)]
        routed = {module for mixture in mixtures for module in mixture.modules()}
        return frozenset(linear for linear, calls in self.inputs.items() if len(calls) == 1 and linear not in routed)

    def sets(self) -> tuple[LinearSet, ...]:
        """See BlockRunner."""
        found: list[tuple[torch.Tensor, list[nn.Linear]]] = []
        for linear, calls in self.inputs.items():
            for tensor, members in found:
                if tensor is calls[0]:
                    members.append(linear)
                    break
            else:
                found.append((calls[0], [linear]))
        idle = [(linear,) for linear in self._linears if linear not in self.inputs]
        return (*(tuple(members) for _, members in found), *idle)

    def stages(self, sets: Sequence[LinearSet]) -> tuple[tuple[LinearSet, ...], ...]:
        """By change: with the outputs of all Linears but those of the stages so far changed, the next stage's inputs stay."""
        left, stages = list(sets), []
        while left:
            changed = self._run(frozenset(linear for members in left for linear in members))
            stage = [members for members in left if self._same(members[0], changed)]
            if not stage:  # inputs with NaN equal nothing: one set after another, as they ran
                stage = left[:1]
            stages.append(tuple(stage))
            left = [members for members in left if members not in stage]
        idle = tuple(members for members in sets if members[0] not in self.inputs)
        ran = [tuple(members for members in stage if members not in idle) for stage in stages]
        return (*(stage for stage in ran if stage), *((idle,) if idle else ()))

    def cuts(self) -> tuple[_Cut, ...]:
        """For each Linear that runs once the outermost module inside the block that hands on its output."""
        found: list[_Cut] = []
        for linear in [linear for linear, calls in self.inputs.items() if len(calls) == 1]:
            output = self._outputs[linear]
            for module, given in self._outputs.items():  # inner modules end first, so the last found is the outermost
                first = given[0] if isinstance(given, tuple) and given else given
                if first is output and module is not linear and module is not self._block:
                    cut = _Cut(linear, module, len(given) if isinstance(given, tuple) else 0)
                    found = [other for other in found if other.last is not linear] + [cut]
        return tuple(found)

    def _same(self, linear: nn.Linear, changed: dict[nn.Linear, list[torch.Tensor]]) -> bool:
        before, after = self.inputs.get(linear, []), changed.get(linear, [])
        return len(before) == len(after) and all(map(torch.equal, before, after))

    @torch.inference_mode()
    def _run(
        self, changed: frozenset[nn.Linear], *, outputs: dict[nn.Module, Any] | None = None
    ) -> dict[nn.Linear, list[torch.Tensor]]:
        inputs: dict[nn.Linear, list[torch.Tensor]] = {}

        def see(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
            if outputs is not None:
                outputs.pop(module, None)
                outputs[module] = output
            if isinstance(module, nn.Linear):
                inputs.setdefault(module, []).append(arguments[0])
            return output * 1.5 + 1 if module in changed else output

        with everywhere(self._block), contextlib.ExitStack() as stack:
            for module in self._block.modules():
                stack.callback(module.register_forward_hook(see).remove)
            run_block(self._block, self._hidden, self._call)
        return inputs


@contextlib.contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


@contextlib.contextmanager
def everywhere(block: nn.Module) -> Iterator[None]:
    """Inside, every expert of the block runs on all tokens; each on a copy, unless it did so before (see LinearExperts)."""
    mixtures = [m for m in block.modules() if isinstance(m, LinearExperts) and not m.every_token]
    try:
        for experts in mixtures:
            experts.every_token = experts.apart = True
        yield
    finally:
        for experts in mixtures:
            experts.every_token = experts.apart = False
