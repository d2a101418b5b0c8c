"""Compares two recordings: which ops and modules correspond, and where values first differ by themselves.

`compare` (in `comparison`) returns a `Comparison` of two recordings; nothing here needs torch.
"""
