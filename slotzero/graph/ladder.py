"""A ladder: the sizes at which a function is captured. `pick` rounds up to one of them."""

from bisect import bisect_left
from dataclasses import dataclass

from slotzero.errors import ConfigError


@dataclass(frozen=True)
class NoCaptureSize:
    """The reason why no size fits, which is always counted and shown."""

    reason: str


@dataclass(frozen=True)
class Ladder:
    sizes: tuple[int, ...]  # ascending, without repeats, all positive

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] < 1:
            raise ConfigError(f"a ladder needs positive sizes, got {self.sizes}")
        if any(a >= b for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ConfigError(f"the sizes of a ladder must ascend without repeats: {self.sizes}")

    @classmethod
    def up_to(cls, maximum: int) -> "Ladder":
        """Return sizes 1, 2, 4, then steps of 8 up to 256, 16 up to 512, 32 above, and
        `maximum`."""
        if maximum < 1:
            raise ConfigError(f"a ladder must end at 1 or more, got {maximum}")
        sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, maximum, 32)]
        return cls((*(size for size in sizes if size < maximum), maximum))

    @classmethod
    def doubling(cls, maximum: int) -> "Ladder":
        """Return powers of two, and from 32 on a size between each two, so that padding never
        doubles the work; `maximum` is always a size."""
        powers = [1 << i for i in range(maximum.bit_length())]
        sizes = sorted([*powers, *(size + size // 2 for size in powers if size >= 32)])
        return cls((*(size for size in sizes if size < maximum), maximum))

    @classmethod
    def multiples(cls, step: int, maximum: int) -> "Ladder":
        """Return multiples of `step` and `maximum`, for functions that are cheap to record."""
        return cls((*range(step, maximum, step), maximum))

    @property
    def maximum(self) -> int:
        return self.sizes[-1]

    def pick(self, n: int) -> int | NoCaptureSize:
        """Return the smallest size of at least n."""
        if n < 1:
            return NoCaptureSize(f"{n} is not a size")
        if n > self.maximum:
            return NoCaptureSize(f"{n} is above the largest size {self.maximum}")
        return self.sizes[bisect_left(self.sizes, n)]
