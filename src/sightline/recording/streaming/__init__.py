"""``path=`` and ``last=``: a recording leaves the session batch by batch while the model runs."""
