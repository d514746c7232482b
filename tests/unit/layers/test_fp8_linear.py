"""Linear layers with fp8 weights against float64, and a model whose layers have such weights."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from native_kernels import randn
from small_model import CPU, SPEC, make_runner, new_request, plan, tokens_of

from raycore.layers import fp8_linear
from raycore.layers.fp8_linear import Fp8Linear
from raycore.layers.operations import Operations
from raycore.messages import StepPlan
from raycore.weights.fp8_weight import Fp8Weight, quantize_rows
from raycore.weights.layer_part_weights import MlpWeights
from raycore.weights.linear_formats import EVERY_FP8
from raycore.weights.loader import DecoderWeights, random_decoder_weights
from raycore.weights.share import WeightShare

TOLERANCE = 0.05
"""Of a result's norm. Each factor is rounded by up to 1/16, and by 2.6 % on average. Errors of many products cancel
each other out as the products themselves do, so the result's relative error is about 2.6 % · √2."""


def exact_product(a_TI, b_IO, a_scales_T1, b_scales_1O, bias_O) -> torch.Tensor:
    product = (a_TI.double() * a_scales_T1.double()) @ (b_IO.double() * b_scales_1O.double())
    return product if bias_O is None else product + bias_O.double()


def make_weight(seed: int, num_rows: int, num_columns: int) -> tuple[torch.Tensor, Fp8Weight]:
    numbers, weight = randn(seed, num_rows, num_columns), Fp8Weight.empty(num_rows, num_columns, CPU)
    weight.quantize_(numbers)
    return numbers, weight


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.fixture(params=["torch", "exact"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """torch's product of fp8 matrices where a CPU has one, and one in float64."""
    if request.param == "exact":
        monkeypatch.setattr(fp8_linear, "scaled_product", exact_product)
        return request.param
    try:
        zeros, ones = torch.zeros(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
        fp8_linear.scaled_product(zeros, zeros.t(), ones, ones.t(), None)
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"torch {torch.__version__} can't multiply in fp8 on this CPU: {error}")
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 7])
@pytest.mark.parametrize("has_bias", [False, True])
def test_fp8_linear_is_close_to_the_unquantized_result(
    product: str, dtype: torch.dtype, num_rows: int, has_bias: bool
) -> None:
    numbers_OI, weight = make_weight(1, 48, 512)
    x_TI, bias_O = randn(2, num_rows, 512).to(dtype), randn(3, 48).to(dtype) if has_bias else None
    linear = Fp8Linear(weight, bias_O, quantize_rows)
    expected = x_TI.double() @ numbers_OI.double().t() + (0 if bias_O is None else bias_O.double())
    found = linear(x_TI)
    assert (found.dtype, found.shape) == (dtype, (num_rows, 48))
    assert relative_error(found, expected) < TOLERANCE
    residual_TO = randn(4, num_rows, 48).to(dtype)
    assert relative_error(linear.add_to(residual_TO.clone(), x_TI), expected + residual_TO.double()) < TOLERANCE


def test_fp8_linear_differs_from_the_exact_product_only_by_rounding(product: str) -> None:
    _, weight = make_weight(1, 32, 64)
    x_TI = randn(2, 5, 64)
    values, scales = quantize_rows(x_TI)
    expected = exact_product(values, weight.values_OI.t(), scales, weight.scales_O.unsqueeze(0), None)
    torch.testing.assert_close(
        Fp8Linear(weight, None, quantize_rows)(x_TI).double(), expected, rtol=2**-8, atol=1e-2 * 2**-8
    )


def test_fp8_linear_takes_steps_without_rows() -> None:
    _, weight = make_weight(1, 32, 16)
    linear = Fp8Linear(weight, None, quantize_rows)
    assert linear(torch.empty(0, 16)).shape == (0, 32)
    assert linear.add_to(torch.empty(0, 32), torch.empty(0, 16)).shape == (0, 32)


def map_weights(weights: DecoderWeights, change: Callable[[Fp8Weight], torch.Tensor]) -> DecoderWeights:
    for layer in weights.layers:
        mlp = layer.feed_forward
        assert isinstance(mlp, MlpWeights)
        for part in (layer, mlp):
            for name, weight in vars(part).items():
                if isinstance(weight, Fp8Weight):
                    setattr(part, name, change(weight))
    return weights


def test_a_model_gives_the_tokens_of_its_rounded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """With activations as they are, and exact products. So every weight is where it belongs, and has its scale."""
    spec = msgspec.structs.replace(SPEC, qkv_bias=False, o_bias=False, mlp_bias=False)
    monkeypatch.setattr(fp8_linear, "scaled_product", exact_product)
    monkeypatch.setattr(Operations, "quantize_rows", lambda self, x_TI: (x_TI, x_TI.new_ones(len(x_TI), 1)))

    def larger(weight: Fp8Weight) -> Fp8Weight:
        return Fp8Weight(weight.values_OI, weight.scales_O * 10)

    def tokens(weights: DecoderWeights) -> list[int]:
        runner = make_runner(spec, weights)
        first = runner.execute(plan([0], [9], new_requests=[new_request(0, range(5, 14), range(5))]))
        return [*tokens_of(first), *(tokens_of(runner.execute(StepPlan(1, bytes(4))))[0] for _ in range(8))]

    def make(change: Callable[[Fp8Weight], object]) -> DecoderWeights:
        return map_weights(random_decoder_weights(WeightShare(spec, torch.float32, formats=EVERY_FP8), seed=3), change)  # pyright: ignore

    rounded = make(lambda weight: larger(weight).values_OI.float() * larger(weight).scales_O.unsqueeze(1))
    found = tokens(make(larger))
    assert found == tokens(rounded)
    assert len(set(found)) > 2, "the tokens tell models apart"


def test_devices_without_fp8_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    assert "need a GPU, and the device is 'cpu'" in str(fp8_linear.unsupported_reason(CPU))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    reason = str(fp8_linear.unsupported_reason(gpu))
    assert "compute capability 8.9 or more" in reason
    assert "A100 has 8.6" in reason


def test_a_torch_without_the_fp8_product_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> torch.Tensor:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(fp8_linear, "scaled_product", fail)
    reason = fp8_linear._failure_of_a_product(CPU)
    assert reason is not None
    assert "no kernel" in reason
    assert torch.__version__ in reason
