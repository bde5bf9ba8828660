"""From the engine's tokens to what a caller sees: text, stop strings, totals, timing. One OutputBuilder a request."""

from dataclasses import dataclass

from narrowgauge.engine.detokenizer import Detokenizer, StopScanner
from narrowgauge.engine.request import FinishReason, PositionLogprobs, Request, RequestOutput, RequestTiming
from narrowgauge.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one step did for one request. `hidden`: the token ended the output and is counted but not shown.

    `error` comes with finish_reason "error" and says why the request failed.
    """

    request_id: str
    token_id: int | None = None
    hidden: bool = False
    logprobs: PositionLogprobs | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    timing: RequestTiming | None = None


class OutputBuilder:
    """Gathers StepOutputs until `take` is called, so that a slow reader gets fewer, longer outputs."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        params = request.params
        self._request = request
        self._detokenizer = Detokenizer(tokenizer, request.prompt_ids, skip_special_tokens=params.skip_special_tokens)
        self._scanner = StopScanner(params.stop, include=params.include_stop_str_in_output)
        self._output_tokens = 0
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []
        self._prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
        self._timing: RequestTiming | None = None
        self._stop_reason: int | str | None = None
        self._error: str | None = None
        self.finish_reason: FinishReason | None = None
        self.filled = False

    def push(self, step: StepOutput) -> bool:
        """Takes in one step. True where a stop string just ended the output: the engine should drop the request."""
        if self.finish_reason is not None:
            return False  # tokens that overran a stop string are not counted
        self.filled = True
        if step.prompt_logprobs is not None:
            self._prompt_logprobs = step.prompt_logprobs
        matched = self._push_token(step) if step.token_id is not None else None
        if matched is not None:
            self.finish_reason, self._stop_reason = "stop", matched
            self._timing = step.timing
            return step.finish_reason is None
        if step.finish_reason is not None:
            text, matched = self._scanner.push(self._detokenizer.flush(), armed=self._armed)
            self._text.append(text if matched else text + self._scanner.flush())
            self.finish_reason = "stop" if matched else step.finish_reason
            self._stop_reason, self._error = matched or step.stop_reason, step.error
            self._timing = step.timing
        return False

    def end(self, reason: FinishReason, *, error: str | None = None) -> None:
        """Ends the output from outside (an abort): what was held back is given out."""
        if self.finish_reason is None:
            self._text.append(self._scanner.push(self._detokenizer.flush(), armed=False)[0])
            self.finish_reason, self._error = reason, error
            self.filled = True

    def take(self) -> RequestOutput:
        """Everything since the last call, as one output."""
        wanted = self._request.params.logprobs is not None
        output = RequestOutput(
            request_id=self._request.request_id,
            text="".join(self._text),
            token_ids=tuple(self._ids),
            logprobs=tuple(self._logprobs) if wanted else None,
            prompt_logprobs=self._prompt_logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            prompt_tokens=len(self._request.prompt_ids),
            output_tokens=self._output_tokens,
            error=self._error,
            timing=self._timing,
        )
        self._text, self._ids, self._logprobs, self._prompt_logprobs, self.filled = [], [], [], None, False
        return output

    @property
    def _armed(self) -> bool:
        return self._output_tokens > self._request.params.min_tokens

    def _push_token(self, step: StepOutput) -> str | None:
        assert step.token_id is not None
        self._output_tokens += 1
        self._ids.append(step.token_id)
        if step.logprobs is not None:
            self._logprobs.append(step.logprobs)
        if step.hidden:
            return None
        text, matched = self._scanner.push(self._detokenizer.push(step.token_id), armed=self._armed)
        self._text.append(text)
        return matched
