"""POST /tokenize and /detokenize, GET /v1/models: what clients ask about the model rather than of it."""

import json
from typing import Any

from fastapi import APIRouter, Request, Response

from narrowgauge.serving.openai.chat import conversation_ids
from narrowgauge.serving.openai.errors import bad_request, unknown_model
from narrowgauge.serving.openai.generation import Service
from narrowgauge.serving.openai.protocol import (
    DetokenizeBody,
    TokenizeBody,
    TokenizeChatBody,
    ignored_fields,
    parse_body,
    read_body,
    read_bytes,
)


def model_routes(service: Service) -> APIRouter:
    """The model list and the tokenizer endpoints."""
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(service)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != service.state.identity.model:
            raise unknown_model(name)
        return _card(service)

    @router.post("/tokenize")
    async def tokenize(request: Request, response: Response) -> dict[str, Any]:
        data = await read_bytes(request)
        ids, strings = await _tokenize(service, data, response)
        engine = service.engine()
        texts = [engine.tokenizer.token_str(token) for token in ids] if strings else None
        return {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids, "token_strs": texts}

    @router.post("/detokenize")
    async def detokenize(request: Request, response: Response) -> dict[str, Any]:
        body = await read_body(request, DetokenizeBody)
        response.headers.update(ignored_fields(body))
        service.check_model(body.model)
        engine = service.engine()
        for token in body.tokens:
            if token >= engine.vocab_size:
                raise bad_request(
                    f"tokens: token id {token} is outside the vocabulary (0 to {engine.vocab_size - 1})", param="tokens"
                )
        return {"prompt": engine.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    return router


async def _tokenize(service: Service, data: bytes, response: Response) -> tuple[list[int], bool]:
    if _has_messages(data):
        chat = parse_body(data, TokenizeChatBody)
        service.check_model(chat.model)
        response.headers.update(ignored_fields(chat))
        return await conversation_ids(service, chat), bool(chat.return_token_strs)
    body = parse_body(data, TokenizeBody)
    service.check_model(body.model)
    response.headers.update(ignored_fields(body))
    special = body.add_special_tokens is not False
    ids = await service.encode(body.prompt, add_special_tokens=special, param="prompt")
    return ids, bool(body.return_token_strs)


def _has_messages(data: bytes) -> bool:
    try:
        value = json.loads(data)
    except ValueError:
        return False  # parse_body says what is wrong
    return isinstance(value, dict) and "messages" in value


def _card(service: Service) -> dict[str, Any]:
    identity, engine = service.state.identity, service.state.engine
    return {
        "id": identity.model,
        "object": "model",
        "created": service.created,
        "owned_by": "narrowgauge",
        "root": identity.model,
        "parent": None,
        "max_model_len": engine.max_model_len if engine else None,
    }
