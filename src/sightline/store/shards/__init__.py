"""Captured tensors as files: shards in the format of safetensors, written and read without torch."""
