"""Model families: one file per family, with everything that is specific to it."""
