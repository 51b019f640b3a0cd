"""The C++ kernels of the CPU: one library, built once per machine and torch version."""
