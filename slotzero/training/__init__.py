"""Training of EAGLE-3 draft heads by distillation from a target model, in plain torch.

head.py         the head, and its passes as a chain of drafts runs them
samples.py      training samples: tokens with the target's hidden states, and batches of them
loss.py         distance between the head's and the target's distribution
acceptance.py   acceptance length: tokens per decoding step with the head
loop.py         the training loop
save.py         the folder of a trained head
data.py         training text, written by the target itself
collect.py      hidden states of the target

Nothing here runs in the engine, and the engine does not import it.
"""
