"""The process and its machine: cache folder, memory, progress bars, signals, child processes."""
