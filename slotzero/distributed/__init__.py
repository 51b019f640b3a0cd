"""Collectives between ranks, and authenticated sockets between machines."""
