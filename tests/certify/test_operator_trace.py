"""Tests of S5's trace: it finds values that reach the host, and not those read inside operators."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from slotzero.certify.operator_trace import OperatorTrace, first_divergence
from slotzero.graph import Registry

LIBRARY = "slotzero_trace"
OPERATORS = {  # schema, implementation
    "longest(Tensor lengths) -> int": lambda lengths: int(lengths.max()),
    "cut(Tensor x, Tensor lengths) -> Tensor": lambda x, lengths: x * (x < lengths.tolist()[0]),
}


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    library = torch.library.Library(LIBRARY, "FRAGMENT")
    for schema, body in OPERATORS.items():
        library.define(schema)
        library.impl(schema.split("(")[0], body, "CPU")
    yield
    library._destroy()


def operator(name: str) -> Callable[..., Tensor]:
    return partial(lambda *args: getattr(getattr(torch.ops, LIBRARY), name)(*args))


def findings(step: Callable[[Tensor, Tensor], object]) -> list[tuple[str, str]]:
    """Return what is found in a step over values and lengths that never change."""
    registry = Registry(torch.device("cpu"))
    x = registry.table("x", torch.zeros(4))
    lengths = registry.table("lengths", torch.ones(4, dtype=torch.int64))
    trace = OperatorTrace(registry)
    trace.watch(lambda: step(x, lengths))
    return trace.findings


WAITS, READS, SHAPE = (
    "the host waits for its value",
    "the host reads its value",
    "depends on values",
)
TO_THE_HOST = {
    "item": (lambda x, n: x[: n[0].item()], WAITS),
    "a number of an operator": (lambda x, n: x[: operator("longest")(n)], WAITS),
    "equal": (lambda x, n: x if torch.equal(n, n) else x + 1, WAITS),
    "tolist": (lambda x, n: x[: n.tolist()[0]], READS),
    "numpy": (lambda x, n: x[: n.numpy()[0]], READS),
    "places of a split": (lambda x, n: x.tensor_split(n), READS),
    "nonzero": (lambda x, n: n.nonzero(), SHAPE),
    "mask as an index": (lambda x, n: n[n > 0], SHAPE),
}


@pytest.mark.parametrize("name", TO_THE_HOST)
def test_a_value_that_reaches_the_host_is_found_even_if_it_never_changes(
    name: str,
) -> None:
    step, text = TO_THE_HOST[name]
    ((tensor, found),) = findings(step)
    assert tensor == "lengths" and text in found


@pytest.mark.parametrize(
    "step",
    [
        lambda x, n: operator("cut")(x, n),
        lambda x, n: x.index_put_((n,), x + 1),
        lambda x, n: x.repeat_interleave(2) + x.cumsum(0).repeat(2),
    ],
    ids=["operator with a body in Python", "index tensor", "fixed shapes"],
)
def test_what_an_operator_reads_for_its_own_result_is_no_finding(
    step: Callable[[Tensor, Tensor], object],
) -> None:
    assert findings(step) == []


def test_a_value_that_differs_between_two_steps_is_named() -> None:
    registry = Registry(torch.device("cpu"))
    x = registry.table("x", torch.zeros(4))
    traces = [OperatorTrace(registry) for _ in range(2)]
    for count, trace in enumerate(traces):
        trace.watch(lambda count=count: x.add_(count))
    ((tensor, found),) = first_divergence(*(trace.lines for trace in traces))
    assert tensor == "x" and "add_" in found
