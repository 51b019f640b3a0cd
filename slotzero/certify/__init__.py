"""Checks that padded rows cannot change a result, for every tensor that a registry declares.

No check names a runner. The package attaches to runners through `graph.observer` and to tables
through `pools.tables`; an engine without the sanitizer never imports it.

The names below certify a function that another engine has captured, and need torch alone
(docs/certify-your-own.md). They are loaded when first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slotzero.certify.captured_checks import certify_captured
    from slotzero.certify.captured_step import (
        CapturedStep,
        Constant,
        Input,
        Output,
        State,
        Workspace,
        constants_of,
    )
    from slotzero.certify.checks import Bounds
    from slotzero.certify.report import Certificate, Violation

_HOMES = {
    "Bounds": "checks",
    "CapturedStep": "captured_step",
    "Certificate": "report",
    "Constant": "captured_step",
    "Input": "captured_step",
    "Output": "captured_step",
    "State": "captured_step",
    "Violation": "report",
    "Workspace": "captured_step",
    "certify_captured": "captured_checks",
    "constants_of": "captured_step",
}

__all__ = [
    "Bounds",
    "CapturedStep",
    "Certificate",
    "Constant",
    "Input",
    "Output",
    "State",
    "Violation",
    "Workspace",
    "certify_captured",
    "constants_of",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'slotzero.certify' has no attribute {name!r}")
    return getattr(import_module(f"slotzero.certify.{_HOMES[name]}"), name)
