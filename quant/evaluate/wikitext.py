"""WikiText-2 exactly as GPTQ's scripts take it, from the hub or from a local copy, and what names a text's revision."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.quant.formats.manifest import sha256_file
from narrowgauge.quant.texts import TextError

DATASET, CONFIG, SPLIT = "Salesforce/wikitext", "wikitext-2-raw-v1", "test"
UNKNOWN = "unknown"
_LOADERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
_FILE = f"{CONFIG}/test-00000-of-00001.parquet"


@dataclass(frozen=True)
class RawText:
    """All rows of a split joined by a blank line, with what a report says of it."""

    text: str
    source: str
    revision: str


def load(path: Path | None = None) -> RawText:
    """The test split of wikitext-2-raw-v1. `path`: a local copy (.parquet or .jsonl with a column `text`).

    Every row counts, blank ones too: without them the text, its tokens and its perplexity are others. Raises TextError
    where it cannot be had, with the way to a local copy.
    """
    name = f"{DATASET}/{CONFIG}/{SPLIT}"
    if path is not None:
        rows = _local_rows(Path(path).expanduser())
        return RawText("\n\n".join(rows), f"{name} from {Path(path).name}", file_digest(Path(path).expanduser()))
    commit = hub_commit(DATASET)
    try:
        rows = _rows(DATASET, CONFIG, split=SPLIT, revision=None if commit == UNKNOWN else commit)
    except TextError:
        raise
    except Exception as error:  # noqa: BLE001  (what the hub's client raises without a network has no common class)
        raise TextError(
            f"wikitext2: cannot be read from the hub ({_line(error)}); where there is a network, run: hf download "
            f"{DATASET} {_FILE} --repo-type dataset --local-dir . and give --text wikitext2:{_FILE}"
        ) from None
    return RawText("\n\n".join(rows), name, commit)


def hub_commit(dataset: str) -> str:
    """The commit that the hub has for a dataset now; "unknown" where it does not answer."""
    try:
        from huggingface_hub import HfApi

        return str(HfApi().dataset_info(dataset, timeout=10).sha)
    except (ImportError, OSError, ValueError):  # huggingface_hub's errors derive from OSError or ValueError
        return UNKNOWN


def file_digest(path: Path) -> str:
    """ "sha256:..." of a file's bytes. Raises TextError where it cannot be read."""
    try:
        return f"sha256:{sha256_file(path)}"
    except OSError as error:
        raise TextError(f"{path}: cannot be read: {error.strerror}") from None


def _local_rows(path: Path) -> list[str]:
    if path.suffix not in _LOADERS:
        raise TextError(f"{path}: a local copy of wikitext2 is a .parquet or .jsonl file with a column text")
    try:
        return _rows(_LOADERS[path.suffix], data_files=str(path), split="train")
    except TextError:
        raise
    except Exception as error:  # noqa: BLE001  (each reader of files has errors of its own)
        raise TextError(f"{path}: cannot be read as rows with a column text: {_line(error)}") from None


def _rows(*arguments: str, **named: Any) -> list[str]:
    try:
        import datasets
    except ImportError:
        raise TextError("wikitext2: reading it needs the package datasets; run: pip install datasets") from None
    datasets.disable_progress_bars()
    return [str(row["text"]) for row in datasets.load_dataset(*arguments, streaming=True, **named)]


def _line(error: Exception) -> str:
    return (str(error.__cause__ or error) or type(error).__name__).splitlines()[0]
