"""Any format, by its own dequantize() at load: right for all of them, with the memory and speed of full precision."""

from narrowgauge.engine.linear_methods.dense import DenseLinear


class DequantizedLinear(DenseLinear):
    """A quantized layer kept as full-precision weights."""

    name = "dequantize"
