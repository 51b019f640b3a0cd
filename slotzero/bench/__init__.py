"""Benchmarks: workloads of token ids, a timeline of every token, and reports that end in JSON."""
