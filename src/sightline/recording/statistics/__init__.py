"""``stats=``: extremes, mean, norm, counts and a fingerprint of each tensor, on the device it is on."""
