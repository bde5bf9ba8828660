"""Hidden states between blocks: the same batches from memory and from disk, halved without moving, durable by rename."""

import pytest
import torch

from narrowgauge.quant.pipeline.activations import (
    HiddenStates,
    StatesDamaged,
    StatesWriter,
    half_of_memory,
    make_durable,
    out_of_memory,
)

CPU = torch.device("cpu")
BATCH_BYTES = 2 * 5 * 8 * 2


def _batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, 5, 8, generator=generator).bfloat16() for size in (2, 2, 2, 1)]


def _written(tmp_path, limit_bytes: int) -> HiddenStates:
    with StatesWriter(tmp_path / "states.bin", dtype=torch.bfloat16, limit_bytes=limit_bytes) as writer:
        for batch in _batches():
            writer.append(batch.float())
        return writer.close(device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("limit_bytes", [0, BATCH_BYTES, 3 * BATCH_BYTES + 1, 1 << 20])
def test_batches_come_back_the_same_whatever_part_of_them_memory_holds(tmp_path, limit_bytes):
    states = _written(tmp_path, limit_bytes)
    assert len(states) == 4
    assert states.tokens == 7 * 5
    for found, expected in zip(states, _batches(), strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, expected.float())
    assert torch.equal(states[-1], _batches()[-1].float())
    assert [len(batch) for batch in states[1:]] == [2, 2, 1]
    again = HiddenStates(tmp_path / "states.bin", states.shape, device=CPU, dtype=torch.bfloat16)
    assert torch.equal(torch.cat(list(again)), torch.cat(_batches()))


def test_no_more_than_the_limit_is_held_in_memory(tmp_path):
    states = _written(tmp_path, 2 * BATCH_BYTES)
    (tmp_path / "states.bin").write_bytes(bytes(states.shape.size_bytes))  # what is not held is now read as zeros
    assert [bool(batch.any()) for batch in states] == [True, True, False, False]


def test_halving_splits_the_largest_batches_until_each_is_one_sample(tmp_path):
    states = _written(tmp_path, 1 << 20)
    assert states.halve()
    assert states.shape.batches == (1,) * 7
    assert torch.equal(torch.cat(list(states)), torch.cat(_batches()).float())
    assert not states.halve()


def test_every_batch_is_aligned_alike_from_memory_and_from_disk(tmp_path):
    for limit_bytes in (0, 1 << 20):
        assert all(batch.data_ptr() % 64 == 0 for batch in _written(tmp_path, limit_bytes))


def test_an_unfinished_writer_leaves_nothing_and_a_cut_file_is_refused(tmp_path):
    with StatesWriter(tmp_path / "x.bin", dtype=torch.bfloat16, limit_bytes=0) as writer:
        writer.append(_batches()[0])
    assert list(tmp_path.iterdir()) == []
    states = _written(tmp_path, 0)
    make_durable(states.path)
    with states.path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(StatesDamaged, match="ends early"):
        states[3]
    with pytest.raises(StatesDamaged, match="has 100 bytes, not 560"):
        HiddenStates(states.path, states.shape, device=CPU, dtype=torch.float32)
    states.path.unlink()
    with pytest.raises(StatesDamaged, match="is missing"):
        HiddenStates(states.path, states.shape, device=CPU, dtype=torch.float32)


def test_failed_allocations_are_told_from_other_errors():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert out_of_memory(caught.value)
    assert out_of_memory(MemoryError())
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not out_of_memory(caught.value)


def test_a_restarted_writer_holds_only_what_came_after(tmp_path):
    with StatesWriter(tmp_path / "states.bin", dtype=torch.bfloat16, limit_bytes=BATCH_BYTES) as writer:
        for batch in _batches():
            writer.append(batch * 7)
        writer.restart()
        for batch in _batches()[1:]:
            writer.append(batch)
        states = writer.close(device=CPU, dtype=torch.bfloat16)
    assert states.shape.batches == (2, 2, 1)
    assert [states.start(position) for position in range(3)] == [0, 2, 4]
    assert torch.equal(torch.cat(list(states)), torch.cat(_batches()[1:]))
    assert half_of_memory() >= 1 << 30
