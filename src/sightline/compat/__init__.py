"""Front doors in the manner of other tools: their names and their output, over the one recorder."""
