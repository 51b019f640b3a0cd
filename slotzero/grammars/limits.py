"""Limits of a grammar in time and memory, and the error messages for exceeding them."""

from dataclasses import dataclass

MAX_IN_USE = 8
"""Limit on the memory of all grammars in use, in units of the limit of one grammar."""


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    reply_seconds: float = 5.0
    """Wall-clock time to compile a grammar, and also to compute a mask."""
    mask_seconds: float = 1.0
    """CPU time to compute one mask. (Wall-clock time would end answers on a busy machine.)"""
    memory: int = 256 << 20
    """Bytes for one grammar."""
    queue_seconds: float = 300.0
    """How long a grammar waits to be compiled while no other grammar is started."""

    @property
    def max_in_use(self) -> int:
        """Bytes for all grammars with answers together."""
        return MAX_IN_USE * self.memory

    @property
    def slow_compile(self) -> str:
        what = f"compiling it took more than {self.reply_seconds:g} s"
        return f"{what}: use a simpler grammar, or raise --grammar-timeout"

    @property
    def too_large(self) -> str:
        what = f"it needs more than {self.memory >> 20} MiB of memory"
        return f"{what}: use a simpler grammar, or raise --grammar-memory"

    @property
    def too_large_together(self) -> str:
        return (
            f"all grammars in use need more than {self.max_in_use >> 20} MiB of memory together, "
            "and this one is the largest: use a simpler grammar, or raise --grammar-memory"
        )

    @property
    def not_compiled(self) -> str:
        what = f"it was not compiled for {self.queue_seconds:g} s because of other grammars in use"
        return f"{what}: send the request again later"


def slow_mask(seconds: float) -> str:
    what = f"computing the mask for the next token took more than {seconds:g} s"
    return f"{what}: use a simpler grammar"


def not_started(reason: str | None) -> str:
    return f"no process can be started for it ({reason}): send the request again later"
