"""Model families: one file each, with everything the engine knows about that family."""
