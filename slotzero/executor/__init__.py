"""Execution of planned steps: the worker of a device, and its ranks as processes."""
