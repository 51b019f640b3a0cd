"""The faults of S7: each breaks one rule of one tensor, and is gone when its context ends.

The rule: whatever index a fault lets through is in range, so a mutant is wrong and never crashes.
"""

from slotzero.sanitizer.faults.case import Case, Fault, swapped
from slotzero.sanitizer.faults.device import KERNELS, RECORDINGS
from slotzero.sanitizer.faults.host import ALLOCATIONS, DOWNLOADS, PUBLICATIONS, STAGINGS

FAULTS: tuple[Fault, ...] = (
    *PUBLICATIONS,
    *RECORDINGS,
    *KERNELS,
    *DOWNLOADS,
    *STAGINGS,
    *ALLOCATIONS,
)

__all__ = ["FAULTS", "Case", "Fault", "swapped"]
