"""Two recordings compared: which ops and modules are the same, and the first place where values truly differ.

`compare` (in `comparison`) makes a `Comparison` of two recordings; everything here works on recordings alone.
"""
