"""The speculation part of the Triton kernel set."""

from slotzero.kernels.contract_speculation import SpeculationKernels
from slotzero.kernels.triton.speculation import speculation, trees


class TritonSpeculation(SpeculationKernels):
    locate_drafts = staticmethod(speculation.locate_drafts)
    locate_new = staticmethod(speculation.locate_new)
    accept = staticmethod(speculation.accept)
    store_features = staticmethod(speculation.store_features)
    keep_last = staticmethod(speculation.keep_last)
    keep_next = staticmethod(speculation.keep_next)
    follow = staticmethod(speculation.follow)
    load_features = staticmethod(speculation.load_features)
    draft_budget = staticmethod(speculation.draft_budget)
    draft_targets = staticmethod(speculation.draft_targets)
    record_ngrams = staticmethod(speculation.record_ngrams)
    propose_ngrams = staticmethod(speculation.propose_ngrams)
    close_draft = staticmethod(speculation.close_draft)
    expand_draft_vocab = staticmethod(speculation.expand_draft_vocab)
    branch = staticmethod(trees.branch)
    accept_tree = staticmethod(trees.accept_tree)
    move_kv = staticmethod(trees.move_kv)
    grow_tree = staticmethod(trees.grow_tree)
    select = staticmethod(trees.select)
