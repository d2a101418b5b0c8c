"""One file per format a graph can be written in."""
