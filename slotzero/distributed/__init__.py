"""Collectives between ranks, and the authenticated sockets between machines."""
