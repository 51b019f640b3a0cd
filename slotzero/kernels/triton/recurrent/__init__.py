"""Recurrent layers: convolution, Mamba-2 and gated delta rule."""
