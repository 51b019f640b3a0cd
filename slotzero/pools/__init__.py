"""Ownership of slots, pages and cached prefixes. Slot 0 and page 0 are never given out."""
