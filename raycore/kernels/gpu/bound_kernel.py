"""Launches of Triton kernels that take the host a few microseconds.

Triton's own launch takes it ten times as long: it looks at all arguments and options to find what it has compiled for
them. With small models, or few tokens, a GPU would wait for that. Most of it is the same in every launch of a kernel
from the same place. So only what can change is looked at here, and Triton launches what it has found before.
"""

from __future__ import annotations

# Triton is untyped:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
from functools import cache
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime import driver

_ALIGNMENT = 16
"""Triton compiles code of its own for integers that are multiples of it, and tensors that begin at such addresses."""
_INT32_ENDS = 1 << 31


class BoundKernel:
    """A Triton kernel with its constants. A launch does what `function[grid](*arguments, **constants)` does.

    Constants are the parameters that are declared so, which come after all others, and options such as `num_warps`.
    """

    def __init__(self, function: Any, **constants: Any) -> None:
        """`function`: what `triton.jit` has made."""
        self._function = function
        self._constants = constants
        self._last_arguments = [constants[name] for name in function.arg_names if name in constants]
        """The constants that are parameters, in their order."""
        self._compiled: dict[tuple[type, ...], _Compiled] = {}
        """By the arguments' types."""

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch `grid` programs on the current stream. `arguments`: the parameters that aren't constants, in order."""
        compiled = self._compiled.get(tuple(map(type, arguments)))
        hook = knobs.runtime.launch_enter_hook  # a chain, or of older versions a function or None
        if compiled is None or getattr(hook, "calls", hook):
            self._launch_by_triton(grid, arguments)
            return
        active = driver.active
        device = active.get_current_device()
        found = compiled.launches.get(compiled.key(device, arguments))
        if found is None:
            self._launch_by_triton(grid, arguments)
            return
        run, handle, metadata, _ = found
        stream = active.get_current_stream(device)
        run(*grid, stream, handle, metadata, None, None, None, *arguments, *self._last_arguments)

    def _launch_by_triton(self, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        kernel = self._function[grid](*arguments, **self._constants)
        if kernel is None:  # it was interpreted
            return
        compiled = self._compiled.setdefault(tuple(map(type, arguments)), _Compiled(arguments))
        key = compiled.key(driver.active.get_current_device(), arguments)
        compiled.launches[key] = kernel.run, kernel.function, kernel.packed_metadata, kernel


class _Compiled:
    """What Triton has compiled for arguments of certain types."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self._tensors = [index for index, argument in enumerate(arguments) if isinstance(argument, Tensor)]
        self._integers = [index for index, argument in enumerate(arguments) if isinstance(argument, int)]
        self.launches: dict[tuple[object, ...], tuple[Any, Any, Any, Any]] = {}
        """What launches a kernel, its handle, its metadata, and what keeps its code loaded, by `key`."""

    def key(self, device: int, arguments: tuple[Any, ...]) -> tuple[object, ...]:
        """Return all that Triton compiles other code for."""
        tensors = [arguments[index] for index in self._tensors]
        return (
            device,
            *[tensor.dtype for tensor in tensors],
            *[tensor.data_ptr() % _ALIGNMENT == 0 for tensor in tensors],
            *[_kind(arguments[index]) for index in self._integers],
        )


def bound(function: Any, **constants: Any) -> BoundKernel:
    """Return the kernel with these constants: the same object for the same ones."""
    return _bound(function, tuple(constants.items()))


@cache
def _bound(function: Any, constants: tuple[tuple[str, Any], ...]) -> BoundKernel:
    return BoundKernel(function, **dict(constants))


def _kind(number: int) -> int:
    """Return a number that is the same for all integers for which Triton compiles the same code."""
    if number == 1:
        return 1
    kind = 2 if number % _ALIGNMENT == 0 else 3
    return kind if -_INT32_ENDS <= number < _INT32_ENDS else -kind
