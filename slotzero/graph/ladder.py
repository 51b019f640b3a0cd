"""A ladder: the sizes that a function is recorded at. `pick` rounds up, or says why it cannot."""

from bisect import bisect_left
from dataclasses import dataclass

from slotzero.errors import ConfigError


@dataclass(frozen=True)
class NoCaptureSize:
    """Why no size fits; it is counted and shown, never swallowed."""

    reason: str


@dataclass(frozen=True)
class Ladder:
    sizes: tuple[int, ...]  # ascending, without repeats, all positive

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] < 1:
            raise ConfigError(f"a ladder needs positive sizes, got {self.sizes}")
        if any(a >= b for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ConfigError(f"the sizes of a ladder ascend without repeats, got {self.sizes}")

    @classmethod
    def up_to(cls, maximum: int) -> "Ladder":
        """1, 2, 4, then steps of 8 to 256, 16 to 512, 32 above; `maximum` is always a size."""
        if maximum < 1:
            raise ConfigError(f"a ladder ends at 1 or more, got {maximum}")
        sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, maximum, 32)]
        return cls((*(size for size in sizes if size < maximum), maximum))

    @classmethod
    def doubling(cls, maximum: int) -> "Ladder":
        """1, 2, 4, ... and from 32 on a size between each two: padding never doubles the work."""
        powers = [1 << i for i in range(maximum.bit_length())]
        sizes = sorted([*powers, *(size + size // 2 for size in powers if size >= 32)])
        return cls((*(size for size in sizes if size < maximum), maximum))

    @classmethod
    def multiples(cls, step: int, maximum: int) -> "Ladder":
        """step, 2 step, ... and `maximum`: for functions that cost nothing to record."""
        return cls((*range(step, maximum, step), maximum))

    @property
    def maximum(self) -> int:
        return self.sizes[-1]

    def pick(self, n: int) -> int | NoCaptureSize:
        """The smallest size that holds n."""
        if n < 1:
            return NoCaptureSize(f"{n} is not a size")
        if n > self.maximum:
            return NoCaptureSize(f"{n} is above the largest size {self.maximum}")
        return self.sizes[bisect_left(self.sizes, n)]
