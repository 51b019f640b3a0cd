"""Choosing the next token: what a request asks for, as tables, and the choice itself."""
