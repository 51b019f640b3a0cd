"""Mixture of experts: routing and grouped products."""
