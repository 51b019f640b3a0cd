"""Execution of planned steps: the worker of one device, and the processes of the other ranks."""
