"""Passes over one block, cut short where what they skip cannot have changed, against plain forward passes."""

import pytest
import torch

from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.model.blocks import Origin, Skeleton, run_block
from narrowgauge.quant.model.inputs import InputsNotFinite
from narrowgauge.quant.model.runner import BlockRunner, linear_sets

IDS = torch.randint(0, 258, (3, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def llama(tiny_llama):
    skeleton = Skeleton(CheckpointReader(tiny_llama()))
    (hidden,) = skeleton.enter(IDS, batch=len(IDS))
    return skeleton, skeleton.calls(IDS.shape[1])[0], hidden


def _runner(skeleton, block, call, **options):
    return BlockRunner(block, call, skeleton.probe(0), **options)


def test_linears_that_read_one_input_form_a_set_in_the_order_they_run(llama):
    skeleton, call, hidden = llama
    with skeleton.loaded(0) as block:
        names = {module: name.rpartition(".")[2] for name, module in skeleton.block_linears(0).items()}
        sets = [[names[module] for module in members] for members in linear_sets(block, hidden[:1], call)]
        runner = _runner(skeleton, block, call)
        assert [[names[m] for m in members] for members in runner.sets] == sets
        assert [[[names[m] for m in members] for members in stage] for stage in runner.stages] == [[s] for s in sets]
    assert sets == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


def test_a_linear_that_no_token_reaches_stands_alone_and_saw_nothing(llama):
    skeleton, call, hidden = llama
    with skeleton.loaded(0) as block:
        block.unused = torch.nn.Linear(64, 8)
        block.unused.origin = Origin("model.layers.0.unused")
        runner = _runner(skeleton, block, call)
        assert runner.stages[-1] == ((block.unused,),)
        collector = runner.collect([block.unused])
        collector.add(hidden)
        assert collector.statistics()[block.unused].tokens == 0
        del block.unused


def test_statistics_are_the_sum_of_outer_products_over_all_batches(llama):
    skeleton, call, hidden = llama
    with skeleton.loaded(0) as block:
        targets = [block.self_attn.q_proj, block.self_attn.v_proj, block.mlp.down_proj]
        seen = {target: [] for target in targets}
        handles = [t.register_forward_pre_hook(lambda m, args: seen[m].append(args[0].flatten(0, 1))) for t in targets]
        run_block(block, hidden, call)
        for handle in handles:
            handle.remove()
        collector = _runner(skeleton, block, call).collect(targets, needs={"hessian", "heldout"})
        collector.add(hidden[:1])
        collector.add(hidden[1:2], heldout=True)
        collector.add(hidden[2:])
        result = collector.statistics()
    assert result[targets[0]] is not result[targets[2]]
    for target in targets:
        x = seen[target][0].double().view(3, 24, -1)
        fitted, heldout = x[[0, 2]].flatten(0, 1), x[1]
        inputs = result[target]
        assert inputs.tokens == 48
        torch.testing.assert_close(inputs.hessian.double(), fitted.t() @ fitted, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(inputs.heldout.double(), heldout.t() @ heldout, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(inputs.absmax.double(), x.flatten(0, 1).abs().amax(0))
        torch.testing.assert_close(inputs.absmean.double(), fitted.abs().mean(0), rtol=1e-5, atol=1e-6)


def test_what_is_not_finite_is_named_by_the_first_layer_it_reaches(llama):
    skeleton, call, hidden = llama
    with skeleton.loaded(0) as block:
        block.self_attn.v_proj.weight[0, 0] = float("nan")
        runner = _runner(skeleton, block, call)
        collector = runner.collect([block.self_attn.q_proj, block.self_attn.o_proj, block.mlp.down_proj])
        collector.add(hidden)
        with pytest.raises(InputsNotFinite, match=r"model\.layers\.0\.self_attn\.o_proj: NaN or infinity") as caught:
            collector.statistics()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cache_bytes", [0, 40_000, 1 << 30])
def test_a_sequential_run_sees_bit_for_bit_what_plain_passes_see(llama, cache_bytes):
    skeleton, call, hidden = llama
    with skeleton.loaded(0) as block:
        runner = _runner(skeleton, block, call, cache_bytes=cache_bytes)
        for members in runner.sets:
            for key, batch in enumerate(hidden.split(1)):
                plain = BlockRunner(block, call, skeleton.probe(0)).inputs(members[:1], batch)
                seen = runner.inputs(members[:1], batch, key=key)
                assert torch.equal(seen[members[0]][0], plain[members[0]][0])
            for module in members:
                module.weight.data = (module.weight * 8).round() / 8
            runner.settle(members)
        for key, batch in enumerate(hidden.split(1)):
            assert torch.equal(runner.output(batch, key=key), run_block(block, batch, call))


def test_a_sequential_run_with_room_calls_each_linear_once_a_batch(llama):
    skeleton, call, hidden = llama
    with skeleton.loaded(0) as block:
        runner = _runner(skeleton, block, call, cache_bytes=1 << 30)
        counts = dict.fromkeys(runner.sets[1] + runner.sets[2] + runner.sets[3], 0)

        def count(module, *_):
            counts[module] += 1

        handles = [module.register_forward_hook(count) for module in counts]
        attended = []
        handles.append(block.self_attn.q_proj.register_forward_hook(lambda *_: attended.append(1)))
        for members in runner.sets:
            collector = runner.collect(members)
            collector.add(hidden, key=0)
            runner.settle(members)
        runner.output(hidden, key=0)
        for handle in handles:
            handle.remove()
    assert set(counts.values()) == {1}
    assert len(attended) == 1


def test_a_linear_that_runs_twice_is_seen_twice_and_never_skipped(llama):
    skeleton, call, hidden = llama
    with skeleton.loaded(0) as block:
        twice = block.mlp.register_forward_hook(lambda module, _, output: module.forward(output))
        runner = _runner(skeleton, block, call, cache_bytes=1 << 30)
        for stage in runner.stages:
            targets = [members[0] for members in stage]
            plain = BlockRunner(block, call, skeleton.probe(0)).inputs(targets, hidden)
            seen = runner.inputs(targets, hidden, key=0)
            for target in targets:
                assert len(seen[target]) == (2 if target in tuple(block.mlp.modules()) else 1)
                assert all(map(torch.equal, seen[target], plain[target]))
            for members in stage:
                runner.settle(members)
        assert torch.equal(runner.output(hidden, key=0), run_block(block, hidden, call))
        twice.remove()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_in_bfloat16_sees_bit_for_bit_what_plain_passes_see(tiny_model):
    skeleton = Skeleton(CheckpointReader(tiny_model("qwen2_moe")), device=torch.device("cuda"), dtype=torch.bfloat16)
    (hidden,), call = skeleton.enter(IDS, batch=len(IDS)), skeleton.calls(IDS.shape[1])[1]
    with skeleton.loaded(1) as block:
        runner = BlockRunner(block, call, skeleton.probe(1), cache_bytes=1 << 30)
        for stage in runner.stages:
            targets = [members[0] for members in stage]
            plain = BlockRunner(block, call, skeleton.probe(1)).inputs(targets, hidden)
            seen = runner.inputs(targets, hidden, key=0)
            assert plain.keys() == seen.keys()
            assert all(torch.equal(plain[target][0], seen[target][0]) for target in seen)
            for members in stage:
                runner.settle(members)
        assert torch.equal(runner.output(hidden, key=0), run_block(block, hidden, call))
