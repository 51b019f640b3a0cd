"""The engine: requests are queued, scheduled, run and committed."""
