"""Measuring: workloads of token ids, a timeline of every token, and a report that ends in JSON."""
