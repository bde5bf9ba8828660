"""The hidden states between two blocks: in memory up to a limit, always on disk, where an interrupted run finds them.

One file holds the states of all samples one after another, [N, L, D] in the model's stored dtype. Batches are runs of
samples, so a batch that turns out too large is halved without moving a byte.
Shapes: N samples, L tokens of a sample, D hidden size.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import torch

from narrowgauge.quant.formats.manifest import fsync_folder
from narrowgauge.quant.pipeline.shards import TensorNotWritten


class StatesDamaged(ValueError):
    """A file of hidden states that does not hold what it should; the message names it."""


@dataclass(frozen=True, kw_only=True)
class StatesShape:
    """What a file of hidden states holds: batches of `batches[i]` samples, each of `length` tokens and `width` channels."""

    batches: tuple[int, ...]
    length: int
    width: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype, as torch has it."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        return self.length * self.width * self.torch_dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of all samples: the size of the file."""
        return sum(self.batches) * self.sample_bytes


class HiddenStates(Sequence[torch.Tensor]):
    """A finished file of hidden states, read as batches [n, L, D] on `device` in `dtype`, those in memory without the disk.

    Each batch that is read is a tensor of its own, so that its address is aligned alike whether it comes from memory or
    from the disk: some matrix products round by alignment, and a resumed run must give the same bits.
    """

    def __init__(
        self,
        path: Path,
        shape: StatesShape,
        *,
        device: torch.device,
        dtype: torch.dtype,
        held: dict[int, torch.Tensor] | None = None,
    ) -> None:
        try:
            size = path.stat().st_size
        except OSError:
            raise StatesDamaged(f"{path}: is missing") from None
        if size != shape.size_bytes:
            raise StatesDamaged(f"{path}: has {size} bytes, not {shape.size_bytes}")
        self.path = path
        self._shape = shape
        self._device, self._dtype = device, dtype
        self._held = held or {}

    @property
    def shape(self) -> StatesShape:
        """Shape and batches as they are now."""
        return self._shape

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(self._shape.batches) * self._shape.length

    def start(self, position: int) -> int:
        """How many samples stand before the batch at `position`: the same for the same samples, however batches are cut."""
        return sum(self._shape.batches[:position])

    def __len__(self) -> int:
        return len(self._shape.batches)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # Sequence's overloads: an index or a slice
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        batch = self._held.get(position)
        if batch is None:
            batch = self._read(position)
        return batch.to(self._device, self._dtype)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[position] for position in range(len(self)))

    def halve(self) -> bool:
        """Splits the largest batches in two, as evenly as can be; False where every batch is a single sample."""
        largest = max(self._shape.batches)
        if largest == 1:
            return False
        sizes: list[int] = []
        for size in self._shape.batches:
            sizes += [size - size // 2, size // 2] if size == largest else [size]
        self._shape = StatesShape(
            batches=tuple(sizes), length=self._shape.length, width=self._shape.width, dtype=self._shape.dtype
        )
        self._held.clear()
        return True

    def _read(self, position: int) -> torch.Tensor:
        shape = self._shape
        batch = torch.empty((shape.batches[position], shape.length, shape.width), dtype=shape.torch_dtype)
        with self.path.open("rb") as file:
            file.seek(self.start(position) * shape.sample_bytes)
            if file.readinto(_bytes_of(batch)) != batch.numel() * batch.element_size():
                raise StatesDamaged(f"{self.path}: ends early")
        return batch


class StatesWriter:
    """Takes batches in order and makes a HiddenStates of them; some of them stay in memory as well.

    `device_bytes` of them stay on the accelerator that they come from, a further `limit_bytes` in the machine's memory.
    A context manager: left without `close`, nothing remains. `append` raises TensorNotWritten where the disk is full.
    """

    def __init__(self, path: Path, *, dtype: torch.dtype, limit_bytes: int, device_bytes: int = 0) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._dtype = dtype
        self._limits = (device_bytes, limit_bytes)
        self._file: IO[bytes] | None = None
        self._device_bytes, self._host_bytes = self._limits
        self._held: dict[int, torch.Tensor] = {}
        self._sizes: list[int] = []
        self._sample: tuple[int, ...] = ()

    def __enter__(self) -> Self:
        self._file = self._temporary.open("wb")
        return self

    def restart(self) -> None:
        """Forgets all batches."""
        assert self._file is not None
        self._file.seek(0)
        self._file.truncate()
        self._device_bytes, self._host_bytes = self._limits
        self._held, self._sizes = {}, []

    def append(self, batch: torch.Tensor) -> None:
        """One batch [n, L, D] of any dtype and device."""
        assert self._file is not None
        own = batch.detach().to("cpu", self._dtype, copy=True).contiguous()
        try:
            self._file.write(_bytes_of(own))
            self._file.flush()
        except OSError as error:
            raise TensorNotWritten(error.errno, f"{self._path.name}: {error.strerror}") from None
        size = own.numel() * own.element_size()
        if batch.device.type != "cpu" and size <= self._device_bytes:
            self._device_bytes -= size
            self._held[len(self._sizes)] = batch.detach().to(self._dtype, copy=True)
        elif size <= self._host_bytes:
            self._host_bytes -= size
            self._held[len(self._sizes)] = own
        self._sizes.append(own.shape[0])
        self._sample = tuple(own.shape[1:])

    def close(self, *, device: torch.device, dtype: torch.dtype) -> HiddenStates:
        """The finished file, readable at once; `make_durable` is still to be called on its path."""
        assert self._file is not None
        length, width = self._sample
        shape = StatesShape(
            batches=tuple(self._sizes), length=length, width=width, dtype=str(self._dtype).removeprefix("torch.")
        )
        self._file.close()
        os.replace(self._temporary, self._path)
        return HiddenStates(self._path, shape, device=device, dtype=dtype, held=self._held)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def make_durable(path: Path) -> None:
    """Waits until the disk has the file and its name."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    fsync_folder(path.parent)


def half_of_memory() -> int:
    """Half of the memory that this machine can give without swapping, in bytes, and at least 1 GiB."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(available // 2, 1 << 30)


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch's error on an accelerator, or what the CPU's allocator and Python raise."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text.lower())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    assert math.prod(tensor.shape) > 0
    return tensor.reshape(-1).view(torch.uint8).numpy().data
