"""Modules that TRL imports."""
