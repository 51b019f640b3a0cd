"""The decode and prefill passes, as specs for the one class that runs them."""
