"""The recurrent part of the Triton kernel set."""

from slotzero.kernels.contract_recurrent import RecurrentKernels
from slotzero.kernels.triton.recurrent import convolution, gate, scan, trail


class TritonRecurrent(RecurrentKernels):
    convolve = staticmethod(convolution.convolve)
    scan = staticmethod(scan.scan)
    gate_norm = staticmethod(gate.gate_norm)
    commit_trail = staticmethod(trail.commit_trail)
