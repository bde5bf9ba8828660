"""Asks replicas over HTTP to answer and to score token ids: the evidence of quality gates."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from narrowgauge.serving.rollout.gates.base import CollectError, Probe
from narrowgauge.serving.rollout.gates.golden import GoldenPrompt, PromptScore, answer_ids, compare, parse_scores

_TOP = 20
_TIMEOUT_S = 120.0  # a small machine scores a prompt in tenths of a second, and may be busy with users

_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, IndexError)
"""What reading an answer raises that is JSON, but not of the shape that was asked for."""


async def score_prompts(prompts: Sequence[GoldenPrompt], probe: Probe) -> tuple[PromptScore, ...]:
    """Stable answers each prompt greedily, then both revisions score prompt and answer.

    Raises CollectError where a replica does not answer, or cannot give token ids.
    """
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as client:
        return tuple([await _score(client, prompt, probe) for prompt in prompts])


async def _score(client: httpx.AsyncClient, prompt: GoldenPrompt, probe: Probe) -> PromptScore:
    prompt_ids = await _prompt_ids(client, prompt, probe)
    answer = await _complete(
        client,
        probe.stable_url,
        {"model": probe.model, "prompt": prompt_ids, "max_tokens": prompt.max_tokens, "temperature": 0, "logprobs": 1},
    )
    try:
        ids = [*prompt_ids, *answer_ids(answer)]
        if len(ids) == len(prompt_ids):
            return PromptScore(tokens=0, agree=0, kl_sum=0.0)
        body = {"model": probe.model, "prompt": ids, "max_tokens": 0, "echo": True, "logprobs": _TOP, "temperature": 0}
        stable, canary = await asyncio.gather(
            _complete(client, probe.stable_url, body), _complete(client, probe.canary_url, body)
        )
        first = len(prompt_ids)
        return compare(parse_scores(stable, prompt_tokens=first), parse_scores(canary, prompt_tokens=first))
    except _MALFORMED as error:
        raise CollectError(f"golden scores cannot be read: {type(error).__name__}: {error}") from None


async def _prompt_ids(client: httpx.AsyncClient, prompt: GoldenPrompt, probe: Probe) -> list[int]:
    body: dict[str, Any] = {"model": probe.model}
    if prompt.messages is not None:
        messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
        body |= {"messages": messages, "add_generation_prompt": True}
    else:
        body |= {"prompt": prompt.prompt}
    answer = await _post(client, f"{probe.stable_url}/tokenize", body)
    try:
        return [int(token) for token in answer.get("tokens", ())]
    except _MALFORMED as error:
        raise CollectError(f"{probe.stable_url}/tokenize: its tokens are no ids: {error}") from None


async def _complete(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await _post(client, f"{url}/v1/completions", {**body, "return_tokens_as_token_ids": True})
    try:
        return dict((answer.get("choices") or [{}])[0])
    except _MALFORMED as error:
        raise CollectError(f"{url}: its choices cannot be read: {error}") from None


async def _post(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        response = await client.post(url, json=body)
        response.raise_for_status()
        return dict(response.json())
    except (httpx.HTTPError, *_MALFORMED) as error:
        raise CollectError(f"{url}: {error or type(error).__name__}") from None
