"""Texts for calibration and for judging: one source, split so that the two never share a document.

Sources: "pydoc" (the language reference that ships with Python: no download), a local .txt, .jsonl or .parquet file, and
"hub:NAME[:CONFIG[:SPLIT]]" (a dataset of the Hugging Face hub). Files and datasets are streamed: of a source of any size
only what is taken is read. A row gives the text of its column `text` or `content`, or the conversation of its column
`messages` or `conversations`.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Split = Literal["calibration", "heldout", "all"]

_HELD_OUT = 5
"""One document (or run of documents) in this many is held out."""
_RUN = 16
"""Documents of a file are split in runs of this many neighbours, so that held-out text still reads on."""
MOST_CHARACTERS = 1 << 26
"""Characters that `documents` takes where it is not told: tens of millions of tokens, and no more than memory holds."""
_LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_TEXT_COLUMNS = ("text", "content")
_CHAT_COLUMNS = ("messages", "conversations")
_ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names of who speaks -> the names that chat templates know."""


class TextError(ValueError):
    """Text that cannot be had, or too little of it; the message names the source."""


@dataclass(frozen=True)
class Chat:
    """A conversation: turns of (role, content), with the roles that chat templates know (system, user, assistant, ...)."""

    turns: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """What was said, without who said it; turns are joined by a blank line."""
        return "\n\n".join(content for _, content in self.turns)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The form that `apply_chat_template` takes."""
        return [{"role": role, "content": content} for role, content in self.turns]


Document = str | Chat


def documents(source: str, *, split: Split, characters: int = MOST_CHARACTERS) -> list[str]:
    """The first documents of one half of `source` as plain text, in a fixed order, until they hold `characters`.

    Raises TextError for a missing or empty source.
    """
    found, total = [], 0
    for document in stream(source, split=split):
        text = document.text if isinstance(document, Chat) else document
        found.append(text)
        total += len(text)
        if total >= characters:
            break
    return found


def stream(source: str, *, split: Split, chat: bool = False) -> Iterator[Document]:
    """The documents of one half of `source`, in a fixed order, read as they are taken.

    `chat` asks for conversations: where a row has both, its conversation is taken, not its text. Raises TextError, for a
    missing or empty source at the first document.
    """
    if source == "pydoc":
        return _pydoc(split)
    rows: Iterator[Document]
    if source.startswith("hub:"):
        rows = _hub(source, chat=chat)
    elif Path(source).suffix in _LOADERS:
        rows = _file(source, chat=chat)
    else:
        raise TextError(f"{source}: unknown text source; use pydoc, a .txt, .jsonl or .parquet file, or hub:NAME")
    return _in_runs(source, rows, split)


def _pydoc(split: Split) -> Iterator[Document]:
    from pydoc_data.topics import topics

    def held_out(name: str) -> bool:
        return int.from_bytes(hashlib.sha256(name.encode()).digest()) % _HELD_OUT == 0

    return (topics[name] for name in sorted(topics) if split == "all" or held_out(name) == (split == "heldout"))


def _in_runs(source: str, rows: Iterator[Document], split: Split) -> Iterator[Document]:
    """One half, by position alone: a row that is added at the end of a long source moves no other between the halves.

    A source shorter than one full round of runs is split in shorter ones, which is why that many are read ahead.
    """
    head = list(itertools.islice(rows, _RUN * _HELD_OUT))
    if not head:
        raise TextError(f"{source}: holds no text")
    if split == "heldout" and len(head) < _HELD_OUT:
        raise TextError(
            f"{source}: {len(head)} documents are too few to hold some out (at least {_HELD_OUT} are needed)"
        )
    run = max(1, min(_RUN, len(head) // _HELD_OUT))
    for index, row in enumerate(itertools.chain(head, rows)):
        if split == "all" or (index // run % _HELD_OUT == _HELD_OUT - 1) == (split == "heldout"):
            yield row


def _file(source: str, *, chat: bool) -> Iterator[Document]:
    path = Path(source).expanduser()
    if not path.is_file():
        raise TextError(f"{source}: no such file")
    if path.stat().st_size == 0:
        raise TextError(f"{source}: holds no text")
    kind = _LOADERS[path.suffix]
    options: dict[str, Any] = {"sample_by": "paragraph"} if kind == "text" else {}
    datasets = _datasets(source)
    try:
        rows = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True, **options)
        yield from _documents_of(source, rows, chat=chat)
    except TextError:
        raise
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        reason = str(error.__cause__ or error) or type(error).__name__
        raise TextError(f"{source}: cannot be read as {kind}: {reason.splitlines()[0]}") from None


def _hub(source: str, *, chat: bool) -> Iterator[Document]:
    name, _, rest = source.removeprefix("hub:").partition(":")
    config, _, split = rest.partition(":")
    datasets = _datasets(source)
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        yield from _documents_of(source, rows, chat=chat)
    except TextError:
        raise
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:  # huggingface_hub's derive from OSError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TextError(f"{source}: cannot be read from the hub: {reason}") from None


def _documents_of(source: str, rows: Any, *, chat: bool) -> Iterator[Document]:
    """The documents of rows (mappings by column), without those that are blank."""
    column = None
    for number, row in enumerate(rows):
        column = column or _column(source, list(row), chat=chat)
        document = _chat(source, number, row[column]) if column in _CHAT_COLUMNS else str(row[column] or "")
        if (document.text if isinstance(document, Chat) else document).strip():
            yield document


def _column(source: str, names: list[str], *, chat: bool) -> str:
    wanted = (*_CHAT_COLUMNS, *_TEXT_COLUMNS) if chat else (*_TEXT_COLUMNS, *_CHAT_COLUMNS)
    for column in wanted:
        if column in names:
            return column
    known = f"{', '.join(wanted[:-1])} or {wanted[-1]}"
    raise TextError(f"{source}: has no column named {known}, only {', '.join(sorted(names))}")


def _chat(source: str, number: int, value: Any) -> Chat:
    """A conversation as OpenAI's API writes it (role, content) or as ShareGPT does (from, value)."""
    turns = []
    for turn in value if isinstance(value, list) else [value]:
        role, content = (
            (turn.get("role") or turn.get("from"), turn.get("content") or turn.get("value"))
            if isinstance(turn, Mapping)
            else (None, None)
        )
        if isinstance(content, list):  # parts, as multimodal sets have them
            content = "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
        if not isinstance(role, str) or not isinstance(content, str | None):
            raise TextError(
                f"{source}: row {number}: a conversation must be a list of turns with role and content (or from and value)"
            )
        turns.append((_ROLES.get(role, role), content or ""))
    return Chat(tuple(turns))


def _datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise TextError(f"{source}: reading it needs the package datasets; run: pip install datasets") from None
    datasets.disable_progress_bars()
    return datasets
