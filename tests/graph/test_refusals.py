"""Tests that a recording refuses, by name and with a remedy, each call that it cannot repeat."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from slotzero.errors import RecordingError
from slotzero.graph.cpu import CpuBackend

LIBRARY = "slotzero_refusals"
OPERATORS = {  # schema, implementation
    "largest(Tensor x) -> int": lambda x: int(x.max()),
    "quiet(Tensor x) -> ()": lambda x: None,
    "itself(Tensor x) -> Tensor": lambda x: x,
    "beside(Tensor x) -> (Tensor, Tensor)": lambda x: (x, x + 1),
    "spread(Tensor x) -> Tensor": lambda x: (x[:1] + 1).expand(4),
    "noisy(Tensor x) -> Tensor": lambda x: x + torch.rand(len(x)),
    "grown(Tensor(a!) x) -> Tensor(a!)": lambda x: x.resize_(8),
    "first(Tensor x, Tensor length) -> Tensor": lambda x, length: x[: int(length)].clone(),
    "shifted(Tensor x, Tensor by) -> Tensor": lambda x, by: x + by.tolist()[0] + by.numpy()[0],
    "maybe(Tensor x, Tensor(a!)? out) -> ()": lambda x, out: None,
}


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    """Operators with a body in Python: what they read inside is read again by a replay."""
    library = torch.library.Library(LIBRARY, "FRAGMENT")
    for schema, body in OPERATORS.items():
        library.define(schema)
        library.impl(schema.split("(")[0], body, "CompositeExplicitAutograd")
    yield
    library._destroy()


def custom(name: str) -> Callable[..., object]:
    return lambda *args: getattr(getattr(torch.ops, LIBRARY), name)(*args)


def set_data(x: Tensor) -> None:
    x.data = x.clone()


def write_to_a_constant(x: Tensor) -> None:
    total = torch.tensor(0.0)
    total += x.sum()


def masked_put(x: Tensor) -> Tensor:
    return x.index_put((x > 0,), torch.ones(4))


VALUE, POINTER = "depends on values of the recorded step to the host", "address"
SHAPE, RANDOM, RESHAPED = "the shape of its result", "random numbers", "shape or memory"
NOT_PLAIN = "not plain memory"
REFUSED = {
    "item": (lambda x: x.sum().item(), r"aten\._local_scalar_dense", VALUE),
    "bool": (lambda x: bool((x > 0).all()), r"aten\._local_scalar_dense", VALUE),
    "index by a scalar": (lambda x: x[x.argmax()], r"aten\._local_scalar_dense", VALUE),
    "equal": (lambda x: torch.equal(x, x), r"aten\.equal", VALUE),
    "tolist": (lambda x: x.tolist(), r"Tensor\.tolist", VALUE),
    "numpy": (lambda x: x.numpy(), r"Tensor\.numpy", VALUE),
    "asarray": (lambda x: np.asarray(x), r"Tensor\.__array__", VALUE),
    "from_dlpack": (lambda x: np.from_dlpack(x), r"Tensor\.__dlpack__", VALUE),
    "places of a split": (
        lambda x: x.tensor_split(torch.tensor([1])), r"Tensor\.tensor_split", VALUE
    ),
    "a number of an operator": (custom("largest"), rf"{LIBRARY}\.largest", VALUE),
    "nonzero": (torch.nonzero, r"aten\.nonzero", SHAPE),
    "masked_select": (lambda x: x.masked_select(x > 0), r"aten\.masked_select", SHAPE),
    "unique": (torch.unique, r"aten\._unique2", SHAPE),
    "mask as an index": (lambda x: x[x > 0], r"aten\.index\.Tensor", SHAPE),
    "bytes as an index": (lambda x: x[(x > 0).byte()], r"aten\.index\.Tensor", SHAPE),
    "values for a mask": (masked_put, r"aten\.index_put", SHAPE),
    "rand": (lambda x: torch.rand(3), r"aten\.rand", RANDOM),
    "bernoulli": (lambda x: x.abs().clamp(0, 1).bernoulli(), r"aten\.bernoulli", RANDOM),
    "own generator": (
        lambda x: x.uniform_(generator=torch.Generator().manual_seed(1)), r"aten\.uniform_", RANDOM
    ),
    "noise of an operator": (custom("noisy"), rf"{LIBRARY}\.noisy", RANDOM),
    "resize": (lambda x: x.clone().resize_(2), r"aten\.resize_", RESHAPED),
    "set": (lambda x: x.clone().set_(x), r"aten\.set_", RESHAPED),
    "data": (lambda x: set_data(x.clone()), r"Tensor\.__set__", RESHAPED),
    "view in place": (lambda x: x.clone().unsqueeze_(0), r"aten\.unsqueeze_", RESHAPED),
    "result of another shape": (
        lambda x: torch.add(x, x, out=torch.empty(0)), r"aten\.add\.out", RESHAPED
    ),
    "growth in an operator": (lambda x: custom("grown")(x.clone()), rf"{LIBRARY}\.grown", RESHAPED),
    "data_ptr": (lambda x: x.data_ptr(), r"Tensor\.data_ptr", POINTER),
    "storage": (lambda x: x.untyped_storage(), r"Tensor\.untyped_storage", POINTER),
    "sparse": (lambda x: x.view(2, 2).to_sparse(), r"aten\._to_sparse", NOT_PLAIN),
    "lazy conjugate": (lambda x: x.to(torch.cfloat).conj(), r"aten\._conj", NOT_PLAIN),
    "another device": (lambda x: x.to("meta"), r"aten\._to_copy", NOT_PLAIN),
    "written constant": (write_to_a_constant, r"aten\.add_", "a constant"),
    "undeclared view": (custom("itself"), rf"{LIBRARY}\.itself", "by its schema"),
    "undeclared effect": (custom("quiet"), rf"{LIBRARY}\.quiet", "by its schema"),
    "argument beside a result": (custom("beside"), rf"{LIBRARY}\.beside", "beside a new tensor"),
    "overlapping result": (custom("spread"), rf"{LIBRARY}\.spread", "share memory"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:__array__", "ignore:indexing with dtype")
@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_no_replay_can_repeat_are_refused_by_name(name: str) -> None:
    call, operator, reason = REFUSED[name]
    with pytest.raises(
        RecordingError, match=rf"^({operator}).* cannot be recorded: .*{reason}.*; "
    ):
        CpuBackend().record(lambda _: call(torch.arange(4.0)))


def attend(x: Tensor) -> Tensor:
    q = x.view(1, 1, 2, 2)
    return torch.nn.functional.scaled_dot_product_attention(q, q, q).view(-1)


REPEATED = {
    "attention without dropout, tagged as random": attend,
    "dropout that is off": lambda x: torch.native_dropout(x, 0.5, False)[0],
    "one value for a mask": lambda x: x.index_put((x > 1,), torch.tensor(7.0)),
    "values read inside an operator": lambda x: custom("shifted")(x, x.long()),
    "constant": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "written copy of a constant": lambda x: torch.tensor(0.0).clone().add_(x.sum()).expand(4),
    "view": lambda x: x.view(2, 2).t().reshape(-1),
    "optional result that is not wanted": lambda x: custom("maybe")(x, None) or x * 1,
}


@pytest.mark.parametrize("name", REPEATED)
def test_calls_that_look_like_refused_ones_are_repeated(name: str) -> None:
    x, out = torch.arange(4.0), torch.zeros(4)
    with torch.inference_mode():
        recording = CpuBackend().record(lambda _: out.copy_(REPEATED[name](x)))
        x.copy_(torch.tensor([3.0, 1.0, 0.0, 2.0]))
        recording.replay()
        assert torch.equal(out, REPEATED[name](x))


def test_a_shape_that_changes_in_a_replay_is_refused() -> None:
    x, length, out = torch.arange(4.0), torch.tensor(1), torch.zeros(4)
    recording = CpuBackend().record(lambda _: out.copy_(custom("first")(x, length)))
    length.fill_(2)
    with pytest.raises(RecordingError, match=rf"^{LIBRARY}\.first.*: {SHAPE} .*; "):
        recording.replay()
