"""The faults of S7: each breaks one rule of one tensor, until its context manager exits.

The rule: every index that a fault lets through is in range, so a mutant is wrong but never crashes.
"""

from slotzero.certify.faults.case import Case, Fault, swapped
from slotzero.certify.faults.device import KERNELS, RECORDINGS
from slotzero.certify.faults.host import ALLOCATIONS, DOWNLOADS, PUBLICATIONS, STAGINGS
from slotzero.certify.faults.layers import LAYERS
from slotzero.certify.faults.ranks import RANKS
from slotzero.certify.faults.recurrent import RECURRENT
from slotzero.certify.faults.replays import REPLAYS
from slotzero.certify.faults.sampling import SAMPLING

FAULTS: tuple[Fault, ...] = (
    *PUBLICATIONS,
    *RECORDINGS,
    *REPLAYS,
    *KERNELS,
    *LAYERS,
    *RANKS,
    *RECURRENT,
    *SAMPLING,
    *DOWNLOADS,
    *STAGINGS,
    *ALLOCATIONS,
)

__all__ = ["FAULTS", "Case", "Fault", "swapped"]
