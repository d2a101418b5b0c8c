"""Turns the rows a recorder writes into a `TraceData`, without torch: all at once, or batch by batch.

A recording in memory, the journal of one that streams and the journal a killed process left behind all pass
through here, so they give the same result.
"""
