"""From what a recorder writes down to a `TraceData`, without torch: in one piece, or batch by batch.

A recording in memory, the journal of one that streams and the journal a killed process left behind all pass
through here, so that they say the same.
"""
