"""What gated layers compute of a gate and of what it gates, for other Triton kernels."""

from __future__ import annotations

# Triton is untyped:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false
import triton
import triton.language as tl


@triton.jit
def gate_and_mul(gate, up, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Returns what `gate_arguments` stand for, of two blocks in float32."""
    if GATE == "silu":
        out = gate / (1.0 + tl.exp(-gate)) * up
    elif GATE == "clamped_swiglu":
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        out = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    elif GATE == "relu2":
        above = tl.maximum(gate, 0.0)
        out = above * above * up
    elif GATE == "gelu":
        out = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    else:
        tl.static_assert(GATE == "gelu_tanh", "unknown gate")
        # 0.5 · (1 + tanh(z)) is the sigmoid of 2z
        doubled = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        out = gate / (1.0 + tl.exp(-doubled)) * up
    return out
