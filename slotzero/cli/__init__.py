"""The command `slotzero`. Nothing here imports torch before a command needs it."""
