"""What the process has around it: cache folder, memory, progress bars, signals, child processes."""
