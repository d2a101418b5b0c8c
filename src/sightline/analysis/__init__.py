"""Pure functions from a trace to something derived: selections, folds, costs, names."""
