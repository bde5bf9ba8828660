"""What an unfinished run leaves behind so that the next one goes on: a hidden work folder beside the output.

.NAME.work/
  lock                      held while a process works here
  fingerprint.json          everything that decides the bits of the result
  block-00003.safetensors   the tensors of a finished block, as the checkpoint will hold them
  inputs-00004.bin          the hidden states that reach the next block
  block-00003.json          the record: written last, so a block without one is not finished

Each file appears by a rename after its bytes are on the disk. A killed run can therefore leave too much, never too little;
what no record speaks of is removed by the next run.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from narrowgauge.quant.formats.manifest import write_atomically
from narrowgauge.quant.formats.read import ReadError, build, plain
from narrowgauge.quant.pipeline.activations import StatesShape, make_durable
from narrowgauge.quant.pipeline.results import BlockResult
from narrowgauge.quant.pipeline.shards import write_tensors

Fingerprint = Mapping[str, Any]
"""JSON: nested mappings and lists of what decides the bits."""

_FINGERPRINT = "fingerprint.json"
_LOCK = "lock"
_NAMED = 4
"""Differences that a refusal names; the rest it counts."""


class ResumeError(ValueError):
    """A work folder that cannot be used: another process holds it, or it belongs to other inputs. Says what to do."""


@dataclass(frozen=True, kw_only=True)
class BlockRecord:
    """A finished block: the bytes of its part file (0: none), what was done, and the shape of the next block's inputs."""

    part_bytes: int
    result: BlockResult
    states: StatesShape | None = None


def work_folder(output: Path) -> Path:
    """Where the unfinished work for a checkpoint at `output` lies."""
    return output.with_name(f".{output.name}.work")


@contextlib.contextmanager
def workspace(output: Path) -> Iterator["Workspace"]:
    """The work folder of `output`, held by this process alone. Raises ResumeError where another process holds it.

    Left without a finished block, after an error or without work, it is removed.
    """
    folder = work_folder(output)
    with _held(folder):
        space = Workspace(folder)
        try:
            yield space
        finally:
            space.close()
            if not space.keeps_work():
                space.remove()


class Workspace:
    """The files of an unfinished run. Blocks are saved in the background, one after another, while the next is at work."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: list[BlockRecord] = []
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="save-block")
        self._saving: Future[None] | None = None

    def begin(self, fingerprint: Fingerprint, *, fresh: bool = False) -> None:
        """Finds the finished blocks of an earlier run with the same fingerprint; `fresh` discards them.

        Raises ResumeError where the folder holds the work of other inputs, naming what differs.
        """
        path = self.folder / _FINGERPRINT
        self.records = []
        if fresh or not self.keeps_work():
            self._clear(keep=frozenset({_LOCK}))
            write_atomically(path, (json.dumps(plain(fingerprint), indent=1, sort_keys=True) + "\n").encode())
            return
        if differences := _differences(_read_json(path), json.loads(json.dumps(plain(fingerprint)))):
            more = f" and {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
            raise ResumeError(
                f"{self.folder}: holds unfinished work of other inputs ({'; '.join(differences[:_NAMED])}{more}); "
                "go back to those, or discard that work with --fresh or by removing the folder"
            )
        self.records = self._finished_blocks()
        needed = {_LOCK, _FINGERPRINT, *(path.name for path in self.folder.glob("kept-*.json"))}
        for index in range(len(self.records)):
            needed |= {self._record(index).name, self.part(index).name}
        needed.add(self.states(len(self.records)).name)
        self._clear(keep=needed)

    def part(self, index: int) -> Path:
        """The tensors of block `index`."""
        return self.folder / f"block-{index:05d}.safetensors"

    def states(self, index: int) -> Path:
        """The hidden states that reach block `index`."""
        return self.folder / f"inputs-{index:05d}.bin"

    def parts(self) -> list[Path]:
        """The part files of all finished blocks, in order."""
        return [self.part(index) for index, record in enumerate(self.records) if record.part_bytes]

    def save_block(self, tensors: Mapping[str, torch.Tensor], result: BlockResult, states: StatesShape | None) -> None:
        """Makes the next block's tensors, result and outputs durable, in the background; `settle` waits for it.

        The file of the outputs, `states(index + 1)`, is written already. Raises what went wrong with the block before.
        """
        self.settle()
        index = len(self.records)
        self.records.append(BlockRecord(part_bytes=_size(tensors), result=result, states=states))
        self._saving = self._saver.submit(self._save, index, dict(tensors), self.records[index])

    def settle(self) -> None:
        """Waits until the last block is safe. Raises OSError where the disk would not take it; it is then not recorded."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            try:
                saving.result()
            except BaseException:
                self.records.pop()
                raise

    def close(self) -> None:
        """Ends the work of the background; what cannot be saved is not recorded, and the next run does it again."""
        with contextlib.suppress(OSError):
            self.settle()
        self._saver.shutdown()

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """The JSON value of a step before the blocks, made once and found again by a resumed run."""
        path = self.folder / f"kept-{name}.json"
        if path.exists():
            return _read_json(path)
        value = json.loads(json.dumps(plain(make()), allow_nan=False))
        write_atomically(path, json.dumps(value).encode())
        return value

    def stage(self) -> Path:
        """An empty folder for the checkpoint in the making."""
        folder = self.folder / "checkpoint"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def kept_work(self) -> str:
        """How an error message ends: what of the work is kept."""
        finished = len(list(self.folder.glob("block-*.json")))
        return f"; {finished} finished blocks are kept in {self.folder}" if finished else ""

    def keeps_work(self) -> bool:
        """Whether something lies here that a later run can use."""
        made = self._record(0).exists() or any(self.folder.glob("kept-*.json"))
        return made and (self.folder / _FINGERPRINT).exists()

    def remove(self) -> None:
        """Removes the folder; the lock goes last."""
        if not self.folder.exists():
            return
        self._clear(keep=frozenset({_LOCK}))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _save(self, index: int, tensors: Mapping[str, torch.Tensor], record: BlockRecord) -> None:
        if tensors:
            write_tensors(self.part(index), tensors)
        if record.states is not None:
            make_durable(self.states(index + 1))
        write_atomically(self._record(index), json.dumps(plain(record), allow_nan=False).encode())
        self.states(index).unlink(missing_ok=True)

    def _record(self, index: int) -> Path:
        return self.folder / f"block-{index:05d}.json"

    def _finished_blocks(self) -> list[BlockRecord]:
        records: list[BlockRecord] = []
        while self._record(len(records)).exists():
            path = self._record(len(records))
            try:
                record = build(BlockRecord, _read_json(path), source=str(path))
            except ReadError as error:
                raise ResumeError(f"{error}; discard the work with --fresh or by removing {self.folder}") from None
            part = self.part(len(records))
            if record.part_bytes and (not part.is_file() or part.stat().st_size < record.part_bytes):
                raise ResumeError(f"{part}: is damaged; discard the work with --fresh or by removing {self.folder}")
            records.append(record)
        return records

    def _clear(self, *, keep: frozenset[str] | set[str]) -> None:
        # The fingerprint goes first: a folder without one holds nothing that a later run would believe.
        for path in sorted(self.folder.iterdir(), key=lambda path: (path.name != _FINGERPRINT, path.name)):
            if path.name not in keep:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResumeError(f"{folder}: cannot be made: {error.strerror}; choose another output") from None
        try:
            file = (folder / _LOCK).open("w")
        except FileNotFoundError:  # the folder's owner has just finished and removed it
            continue
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ResumeError(
                    f"{folder}: another process is at work on this checkpoint; wait for it, or stop it"
                ) from None
            # A lock on a file that was removed in between excludes nobody.
            if _same_file(folder / _LOCK, file.fileno()):
                yield
                return


def _same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _differences(before: Any, now: Any, path: str = "") -> list[str]:
    """What differs between two JSON values, as "key.path: old -> new"."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [*before, *(key for key in now if key not in before)]
        return [
            line
            for key in keys
            for line in _differences(before.get(key), now.get(key), f"{path}.{key}" if path else key)
        ]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [
            line
            for index, (one, other) in enumerate(zip(before, now, strict=True))
            for line in _differences(one, other, f"{path}[{index}]")
        ]
    return [] if before == now else [f"{path}: {_shown(before)} then, {_shown(now)} now"]


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ResumeError(
            f"{path}: is damaged ({error}); discard the work with --fresh or by removing {path.parent}"
        ) from None


def _size(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
