"""Where weights come from: every source behind one contract, `Checkpoint`."""
