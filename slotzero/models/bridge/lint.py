"""What a recorded graph could not repeat, found while a model runs over fake tensors.

A fake tensor has no numbers, so code fails where the host reads one or a shape depends on one; the
failure is attributed to the innermost module that ran. A tensor made from numbers of the host, and
one that a module keeps from step to step, would be memory that is not registered.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slotzero.errors import SlotzeroError, UnsupportedModelError
from slotzero.models.bridge.library import first_line
from slotzero.models.bridge.parts import Parts

_FROM_HOST = ("aten.lift_fresh.default", "aten.lift_fresh_copy.default")


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn the errors of code that is not ours into a refusal."""
    try:
        yield
    except SlotzeroError:
        raise
    except Exception as error:
        raise UnsupportedModelError(f"{what}: {first_line(error)}") from error


class Lint(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Attributes failures to modules, and refuses tensors made from numbers of the host.

    A pass without `refuses` may make them, as masks are made in it that recorded passes do without.
    """

    def __init__(self, name: str, parts: Parts, refuses: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name, self._parts, self._refuses = name, parts, refuses
        self._inside: list[str] = []  # the modules that run, outermost first
        self._handles: list[Any] = []

    def __enter__(self) -> Any:
        for path, module in self._parts.named_modules():
            self._handles += [
                module.register_forward_pre_hook(
                    self._entered(f"{path} ({type(module).__name__})")
                ),
                module.register_forward_hook(self._left),
            ]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        if isinstance(error, Exception) and not isinstance(error, SlotzeroError):
            raise UnsupportedModelError(
                f"{self._where} does what no recorded graph can repeat, such as reading a value on "
                f"the host: {type(error).__name__}: {first_line(error)}"
            ) from error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._refuses and str(func) in _FROM_HOST:
            raise UnsupportedModelError(
                f"{self._where} makes a tensor from numbers of the host in every step, which a "
                "recorded graph cannot do"
            )
        return func(*args, **(kwargs or {}))

    @property
    def _where(self) -> str:
        return f"{self._name}: {self._inside[-1] if self._inside else 'its forward'}"

    def _entered(self, label: str) -> Callable[..., None]:
        return lambda *_: self._inside.append(label)

    def _left(self, *_: Any) -> None:
        self._inside.pop()


def tensors_in(parts: Parts) -> dict[str, Tensor]:
    """Return every tensor that modules hold, by name; refuse those that cannot be registered."""
    found: dict[str, Tensor] = {}
    for path, module in parts.named_modules():
        for kept in (module._parameters, module._buffers):
            found |= {f"{path}.{name}": t for name, t in kept.items() if t is not None}
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                raise UnsupportedModelError(
                    f"{type(parts.model).__name__}: {path} holds the tensor {name}, which is "
                    "neither a parameter nor a buffer, in memory that is not registered"
                )
    return found


def refuse_kept(name: str, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Raise if a pass has left a tensor in a module, or replaced one."""
    for where, tensor in after.items():
        if before.get(where) is not tensor:
            raise UnsupportedModelError(
                f"{name}: a pass leaves the tensor {where} for the next, in memory that is not "
                "registered"
            )
