"""Data-flow graphs: from a run or an export, folded, collapsed, pruned, and written in many formats."""
