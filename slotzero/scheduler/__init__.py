"""Who runs next: requests in, steps out."""
