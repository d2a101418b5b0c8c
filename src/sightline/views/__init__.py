"""Views of a trace, one file each. A view sees only a `Trace` and returns a `View`."""
