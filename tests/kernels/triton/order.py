"""Sums of the interpreter in the orders that a GPU may take.

NumPy's own order depends on the library. Here a matrix product adds 16 products at a time to its
sum and rounds it, as a matrix instruction does. Any other sum takes an order that the shape of the
tile decides, as a layout of threads does: a kernel that promises one result must not depend on it.
"""

import random

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

STEP = 16  # products that one instruction adds up


def sum_like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
    monkeypatch.setattr(interpreter.ReduceOps, "sum", _sum)


def _dot(self, a, b, total, input_precision, max_num_imprecise_acc):
    left, right = (_numbers(of).astype(np.float64) for of in (a, b))
    made = total.data
    for k in range(0, left.shape[-1], STEP):
        part = np.matmul(left[..., k : k + STEP], right[..., k : k + STEP, :])
        made = (made.astype(np.float64) + part).astype(total.data.dtype)
    return interpreter.TensorHandle(made, total.dtype.scalar)


def _numbers(operand):
    if operand.dtype.is_fp8():
        whole = interpreter._convert_float(operand.data, operand.dtype, tl.float16, None)
        return whole.view(np.float16)
    return operand.data


def _sum(self, given):
    data, axis = given.handle.data, self.axis
    if not np.issubdtype(data.dtype, np.floating) or axis is None:
        made = np.sum(data, axis=axis, keepdims=self.keep_dims, dtype=data.dtype)
        return self.to_tensor(made, given.dtype)
    order = [*range(data.shape[axis])]
    random.Random(str(data.shape)).shuffle(order)
    made = np.take(np.cumsum(np.take(data, order, axis), axis, data.dtype), -1, axis)
    return self.to_tensor(np.expand_dims(made, axis) if self.keep_dims else made, given.dtype)
