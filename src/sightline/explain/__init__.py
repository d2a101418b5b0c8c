"""Explains how a run ended, from its recording: the note on the exception that left the block.

The recorder calls it when it has stopped. It reads a recording and a few facts, and never torch.
"""
