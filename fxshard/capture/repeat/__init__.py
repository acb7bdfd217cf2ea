"""Truncate and stamp: capture a deep model at the cost of a shallow one.

Blocks that repeat are left out of their lists, the rest is captured, and the nodes of the missing
blocks are written as images of their neighbours'. Nothing is taken on faith: forward of the full
model, all blocks of it, is rehearsed on fake tensors first, and must be, operator by operator, what
follows from a rehearsal of the shortened one. What is not so is captured flat, and one line of the
log says why. docs/adr/0019-truncate-and-stamp.md has what that proves, and what it cannot see.
"""
