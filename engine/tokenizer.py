"""Text to token ids and back, with the model's own chat template."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from narrowgauge.engine.control_tokens import ControlTokens
from narrowgauge.engine.request import RequestError


class TokenizerError(ValueError):
    """A checkpoint folder whose tokenizer cannot be read; the message names the file."""


class ChatTemplateError(RequestError):
    """Messages that the model's chat template cannot render, or a model that has none."""


class Tokenizer:
    """A checkpoint's tokenizer. Safe to use from several threads. Ids are the model's; no text is ever normalised by us."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        settings: Mapping[str, Any],
        template: str | None,
        eos_ids: frozenset[int],
    ) -> None:
        """`settings` is tokenizer_config.json; `eos_ids` are the ids that end an output besides the tokenizer's own."""
        self._backend = backend
        self._settings = settings
        self._template_source = template
        own_eos = self._special_id("eos_token")
        self.bos_id = self._special_id("bos_token")
        self.eos_ids: frozenset[int] = eos_ids | ({own_eos} if own_eos is not None else set())

    @classmethod
    def from_folder(cls, path: Path) -> "Tokenizer":
        """Reads tokenizer.json (or what transformers can turn into one), its settings, chat template and end tokens."""
        folder = Path(path)
        settings = _read_json(folder / "tokenizer_config.json")
        eos: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            found = _read_json(folder / name).get("eos_token_id")
            if found is not None:
                eos |= set(found) if isinstance(found, list) else {found}
                break  # generation_config.json is the later word where it exists
        return cls(
            _read_backend(folder), settings=settings, template=_read_template(folder, settings), eos_ids=frozenset(eos)
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows; the model's own vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """UTF-8 bytes of the longest ordinary token: a text of n bytes has at least n / longest_token tokens."""
        return max(len(token.encode()) for token in self._backend.get_vocab(with_added_tokens=True))

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out by default."""
        return self._special_ids

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. With add_special_tokens the model's own beginning token (if it uses one) is put in front."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self.bos_id is not None:
            wanted, present = self._settings.get("add_bos_token"), ids[:1] == [self.bos_id]
            if wanted is True and not present:
                ids = [self.bos_id, *ids]
            elif wanted is False and present and not text.startswith(str(self._special_text("bos_token"))):
                ids = ids[1:]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_str(self, token_id: int) -> str:
        """Text of one id, special tokens shown; '' for an id beyond the tokenizer's vocabulary."""
        return self.decode([token_id], skip_special_tokens=False)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can work."""
        return self._template_source is not None

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Ids of a conversation [{"role", "content"}, ...] by the model's chat template. Raises ChatTemplateError.

        Control tokens come from the template alone: a message that spells one costs ordinary tokens.
        """
        return self.encode_chat(
            self.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables),
        )

    def encode_chat(self, pieces: Sequence[str]) -> list[int]:
        """Ids of what `render_chat` gave. Raises ChatTemplateError."""
        ids = [i for piece in pieces for i in self.encode(piece, add_special_tokens=False)]
        if self._controls.smuggled(pieces, ids):
            raise ChatTemplateError(
                "the messages spell a control token of the model in a way that cannot be told from its own; "
                "leave it out",
                param="messages",
            )
        return ids

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> tuple[str, ...]:
        """The text of a conversation, split inside each control token that the messages or `variables` spell.

        `variables` are handed to the template. Raises ChatTemplateError.
        """
        if self._template_source is None:
            raise ChatTemplateError(
                "this model has no chat template: use completions with a prompt instead", param="messages"
            )
        specials = {
            name: self._special_text(name) or "" for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        }
        try:
            safe, others, mark = self._controls.marked(messages, variables)
            text: str = self._template.render(
                **{**specials, **others}, messages=safe, add_generation_prompt=add_generation_prompt
            )
            return tuple(text.split(mark))
        except jinja2.TemplateError as error:
            raise ChatTemplateError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from None
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ChatTemplateError(
                f"the model's chat template cannot render these messages: {error}", param="messages"
            ) from None

    @cached_property
    def _controls(self) -> ControlTokens:
        return ControlTokens(self._backend, self._template_source or "")

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
        assert self._template_source is not None
        return environment.from_string(self._template_source)

    def _special_text(self, name: str) -> str | None:
        value = self._settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        return text if isinstance(text, str) else None

    def _special_id(self, name: str) -> int | None:
        text = self._special_text(name)
        return None if text is None else self._backend.token_to_id(text)


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise TokenizerError(f"{path}: not a tokenizer file: {error}") from None
    if not any(folder.glob("*.model")) and not (folder / "vocab.json").is_file():
        raise TokenizerError(f"{folder}: no tokenizer.json (nor another tokenizer file): copy it from the base model")
    from transformers import AutoTokenizer  # only here: it costs seconds

    return AutoTokenizer.from_pretrained(folder).backend_tokenizer  # type: ignore[no-any-return]


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: is not valid JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)  # jinja's own escapes HTML


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
