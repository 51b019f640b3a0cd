"""Process and machine: cache folder, memory, progress bars, signals and child processes."""
