"""Draft bookkeeping and trees of drafts."""
