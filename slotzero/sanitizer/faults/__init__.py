"""The faults of S7: each breaks one rule of one tensor, and is gone when its context ends.

The rule: whatever index a fault lets through is in range, so a mutant is wrong and never crashes.
"""

from slotzero.sanitizer.faults.case import Case, Fault, swapped
from slotzero.sanitizer.faults.device import KERNELS, LAYERS, RECORDINGS
from slotzero.sanitizer.faults.host import ALLOCATIONS, DOWNLOADS, PUBLICATIONS, STAGINGS
from slotzero.sanitizer.faults.recurrent import RECURRENT

FAULTS: tuple[Fault, ...] = (
    *PUBLICATIONS,
    *RECORDINGS,
    *KERNELS,
    *LAYERS,
    *RECURRENT,
    *DOWNLOADS,
    *STAGINGS,
    *ALLOCATIONS,
)

__all__ = ["FAULTS", "Case", "Fault", "swapped"]
