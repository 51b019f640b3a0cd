"""Processes that compute one model together: who they are, what each has of it, what they tell."""
