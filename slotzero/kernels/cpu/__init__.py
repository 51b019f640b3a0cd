"""C++ kernels for the CPU: one library, built once per machine and torch version."""
