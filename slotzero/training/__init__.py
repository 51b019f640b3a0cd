"""Distils an EAGLE-3 draft head from a target model, in plain torch.

head.py         the head, and its passes as a chain of drafts would run them
samples.py      what it learns from: tokens with the target's hidden states, and batches of them
loss.py         how far its drafts are from the target's distribution
acceptance.py   how many tokens a step of decoding would gain with it
loop.py         the training itself
save.py         the folder that holds a trained head
data.py         text to learn from, written by the target itself

Nothing here runs in the engine, and the engine imports nothing of it.
"""
