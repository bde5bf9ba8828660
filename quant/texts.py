"""Texts for calibration and for judging: one source, split so that the two never share a document.

Sources: "pydoc" (the language reference that ships with Python: no download), a local .txt, .jsonl or .parquet file, and
"hub:NAME[:CONFIG[:SPLIT]]" (a dataset of the Hugging Face hub, streamed).
"""

import hashlib
import itertools
from pathlib import Path
from typing import Any, Literal

Split = Literal["calibration", "heldout", "all"]

_HELD_OUT = 5
"""One document (or run of documents) in this many is held out."""
_RUN = 16
"""Documents of a file are split in runs of this many neighbours, so that held-out text still reads on."""
_HUB_DOCUMENTS = 20_000
"""Documents read from a hub dataset: enough for a hundred million tokens, few enough to stream."""
_LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_COLUMNS = ("text", "content")


class TextError(ValueError):
    """Text that cannot be had, or too little of it; the message names the source."""


def documents(source: str, *, split: Split) -> list[str]:
    """The documents of one half of `source`, in a fixed order. Raises TextError for a missing or empty source."""
    if source == "pydoc":
        return _pydoc(split)
    if source.startswith("hub:"):
        found = _hub(source)
    elif Path(source).suffix in _LOADERS:
        found = _file(source)
    else:
        raise TextError(f"{source}: unknown text source; use pydoc, a .txt, .jsonl or .parquet file, or hub:NAME")
    found = [text for text in found if text.strip()]
    if not found:
        raise TextError(f"{source}: holds no text")
    chosen = _in_runs(found, split)
    if not chosen:
        raise TextError(
            f"{source}: {len(found)} documents are too few to hold some out (at least {_HELD_OUT} are needed)"
        )
    return chosen


def _pydoc(split: Split) -> list[str]:
    from pydoc_data.topics import topics

    def held_out(name: str) -> bool:
        return int.from_bytes(hashlib.sha256(name.encode()).digest()) % _HELD_OUT == 0

    return [topics[name] for name in sorted(topics) if split == "all" or held_out(name) == (split == "heldout")]


def _in_runs(found: list[str], split: Split) -> list[str]:
    if split == "all":
        return found
    run = max(1, min(_RUN, len(found) // _HELD_OUT))
    return [
        text for index, text in enumerate(found) if (index // run % _HELD_OUT == _HELD_OUT - 1) == (split == "heldout")
    ]


def _file(source: str) -> list[str]:
    path = Path(source).expanduser()
    if not path.is_file():
        raise TextError(f"{source}: no such file")
    if path.stat().st_size == 0:
        raise TextError(f"{source}: holds no text")
    kind = _LOADERS[path.suffix]
    options: dict[str, Any] = {"sample_by": "paragraph"} if kind == "text" else {}
    datasets = _datasets(source)
    try:
        rows = datasets.load_dataset(kind, data_files=str(path), split="train", **options)
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        raise TextError(
            f"{source}: cannot be read as {kind}: {str(error.__cause__ or error).splitlines()[0]}"
        ) from None
    column = _column(source, rows.column_names)
    return [str(text) for text in rows[column]]


def _hub(source: str) -> list[str]:
    name, _, rest = source.removeprefix("hub:").partition(":")
    config, _, split = rest.partition(":")
    datasets = _datasets(source)
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        first = next(iter(rows), None)
        if first is None:
            return []
        column = _column(source, list(first))
        return [str(row[column]) for row in itertools.islice(rows, _HUB_DOCUMENTS)]
    except (OSError, ValueError) as error:  # the library's own errors and huggingface_hub's derive from these
        if isinstance(error, TextError):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TextError(f"{source}: cannot be read from the hub: {reason}") from None


def _column(source: str, names: list[str]) -> str:
    for column in _COLUMNS:
        if column in names:
            return column
    raise TextError(f"{source}: has no column named {' or '.join(_COLUMNS)}, only {', '.join(sorted(names))}")


def _datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise TextError(f"{source}: reading it needs the package datasets; run: pip install datasets") from None
    datasets.disable_progress_bars()
    return datasets
