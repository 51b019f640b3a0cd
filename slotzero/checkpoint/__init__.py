"""Sources of weights, all behind one contract: `Checkpoint`."""
