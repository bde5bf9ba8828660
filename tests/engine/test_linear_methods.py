"""Every method gives the dequantized product, and the choice between them is as documented."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from narrowgauge.engine.linear_methods.base import (
    LINEAR_METHODS,
    LinearMethodError,
    LinearOptions,
    StoredLinear,
    make_linear,
)
from narrowgauge.quant.formats.base import QuantizedWeight, get_format
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.compressed_tensors import CompressedTensors
from narrowgauge.quant.formats.scheme import Scheme, WeightScheme

CPU = torch.device("cpu")
BF16 = LinearOptions(dtype=torch.bfloat16, device=CPU)
FP32 = LinearOptions(dtype=torch.float32, device=CPU)
W4 = WeightScheme(bits=4, group=32)


def write_checkpoint(folder: Path, schemes: dict[str, WeightScheme | None], *, bias: bool = False) -> CheckpointReader:
    """A checkpoint of Linears [32, 64] under the given names."""
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, scheme in schemes.items():
        if scheme is None:
            tensors[f"{name}.weight"] = torch.randn(32, 64).bfloat16()
        else:
            shape = (32, 64 // (scheme.group or 64))
            weight = QuantizedWeight(
                codes=torch.randint(scheme.qmin, scheme.qmax + 1, (32, 64), dtype=torch.int8),
                scales=(torch.rand(shape) / 10 + 0.01).bfloat16(),
                zeros=None if scheme.symmetric else torch.randint(-4, 4, shape, dtype=torch.int8),
            )
            packed = CompressedTensors().pack(weight, Scheme(weights=scheme))
            tensors |= {f"{name}.{local}": tensor for local, tensor in packed.items()}
        if bias and name != "v":
            tensors[f"{name}.bias"] = torch.randn(32).bfloat16()
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config: dict[str, object] = {"architectures": ["LlamaForCausalLM"]}
    if quantized := {name: Scheme(weights=scheme) for name, scheme in schemes.items() if scheme is not None}:
        config["quantization_config"] = CompressedTensors().config(quantized, ())
    (folder / "config.json").write_text(json.dumps(config))
    return CheckpointReader(folder)


def expected(reader: CheckpointReader, names: tuple[str, ...], x: torch.Tensor) -> torch.Tensor:
    parts = []
    for name in names:
        bias = reader.linear(name).bias
        product = x.double() @ reader.weight(name, torch.float32).double().t()
        parts.append(product if bias is None else product + bias.double())
    return torch.cat(parts, -1)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 8, 9, 40])
@pytest.mark.parametrize(("choice", "options"), [("int4", BF16), ("dequantize", BF16), ("dequantize", FP32)])
def test_packed_projections_equal_their_parts(
    tmp_path: Path, symmetric: bool, bias: bool, rows: int, choice: str, options: LinearOptions
) -> None:
    names = ("q", "k", "v")
    reader = write_checkpoint(
        tmp_path, dict.fromkeys(names, WeightScheme(bits=4, group=32, symmetric=symmetric)), bias=bias
    )
    method = make_linear(StoredLinear(reader, names), choice, options)
    assert method.name == choice
    x = torch.randn(rows, 64).to(options.dtype)
    answer, wanted = method(x), expected(reader, names, x)
    assert answer.dtype == options.dtype
    tolerance = 1e-5 if options.dtype == torch.float32 else 2e-2
    assert float((answer.double() - wanted).abs().max() / wanted.abs().max()) < tolerance


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["gptq", "gptq_v2", "awq"])
def test_codes_of_other_formats_run_as_those_of_compressed_tensors(tmp_path: Path, name: str, symmetric: bool) -> None:
    scheme = Scheme(weights=WeightScheme(bits=4, group=32, symmetric=symmetric))
    reader = write_checkpoint(tmp_path / "ct", {"q": scheme.weights})
    wanted = make_linear(StoredLinear(reader, ("q",)), "int4", BF16)
    packed = get_format(name).pack(reader.unpack("q"), scheme)
    other = tmp_path / "other"
    other.mkdir()
    save_file({f"q.{local}": tensor for local, tensor in packed.items()}, other / "model.safetensors")
    config = {"quantization_config": get_format(name).config({"q": scheme}, ())}
    (other / "config.json").write_text(json.dumps(config))
    method = make_linear(StoredLinear(CheckpointReader(other), ("q",)), "auto", BF16)
    assert method.name == "int4"
    for rows in (1, 40):
        x = torch.randn(rows, 64).bfloat16()
        torch.testing.assert_close(method(x), wanted(x), atol=1e-2, rtol=1e-2)


def test_the_quickest_method_that_can_run_a_layer_is_chosen(tmp_path: Path) -> None:
    schemes = {"plain": None, "w4": W4, "w8": WeightScheme(bits=8, group=32), "channel": WeightScheme(bits=4)}
    reader = write_checkpoint(tmp_path, schemes)
    chosen = {name: make_linear(StoredLinear(reader, (name,)), "auto", BF16).name for name in schemes}
    assert chosen == {"plain": "dense", "w4": "int4", "w8": "dequantize", "channel": "int4"}  # 64 columns: one group
    assert make_linear(StoredLinear(reader, ("w4",)), "auto", FP32).name == "dequantize"
    mixed = StoredLinear(reader, ("plain", "w4", "w8"))
    method = make_linear(mixed, "auto", FP32)
    assert method.name == "dequantize"
    x = torch.randn(3, 64)
    torch.testing.assert_close(method(x).double(), expected(reader, mixed.names, x), atol=1e-4, rtol=1e-4)


def test_a_forced_method_that_cannot_run_says_why(tmp_path: Path) -> None:
    reader = write_checkpoint(tmp_path, {"w8": WeightScheme(bits=8, group=32), "w4": W4})
    with pytest.raises(LinearMethodError, match=r"--linear int4: w8: it is W8A16, not W4A16"):
        make_linear(StoredLinear(reader, ("w8",)), "int4", BF16)
    with pytest.raises(LinearMethodError, match="bfloat16 activations"):
        make_linear(StoredLinear(reader, ("w4",)), "int4", FP32)


def test_without_the_second_copy_int4_takes_a_quarter_of_the_memory_and_runs_wide_batches_too(tmp_path: Path) -> None:
    reader = write_checkpoint(tmp_path, {"w4": W4})
    options = LinearOptions(dtype=torch.bfloat16, device=CPU, dense_copy=False)
    lean, full = (make_linear(StoredLinear(reader, ("w4",)), "int4", chosen) for chosen in (options, BF16))
    assert lean.nbytes < 0.5 * 32 * 64 * 2 < full.nbytes
    x = torch.randn(40, 64).bfloat16()
    wanted = expected(reader, ("w4",), x)
    assert float((lean(x).double() - wanted).abs().max() / wanted.abs().max()) < 2e-2


def test_an_unblocked_weight_gives_the_same_product(tmp_path: Path) -> None:
    reader = write_checkpoint(tmp_path, {"plain": None})
    plain = LinearOptions(dtype=torch.float32, device=CPU, blocked=False)
    x = torch.randn(5, 64)
    answers = [make_linear(StoredLinear(reader, ("plain",)), "auto", options)(x) for options in (plain, FP32)]
    torch.testing.assert_close(answers[0], answers[1], atol=1e-5, rtol=1e-5)


def test_every_method_says_whether_it_can_run_a_layer() -> None:
    assert set(LINEAR_METHODS) == {"dense", "dequantize", "int4"}
