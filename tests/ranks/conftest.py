"""The jobs here are started by torchrun; on their own they cannot be imported."""

collect_ignore_glob = ["*_job.py"]
