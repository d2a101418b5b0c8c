"""The recordings of a distributed job as one run.

Each process has written its own recording. `folder` finds them, `record` reduces one to what is compared,
`merge` reads them one after the other, and the rest works on that: `desync` (where ranks part), `messages`
(sends and receives that do not match), `collective_waits` (who waits for whom), `stragglers` (who is late
and why), `replicas` (weights, batches and modes that should be equal), `reduced_gradients` (which weights are
replicas), `buffers` (the same of buffers), `rank_ends` (how each rank ended), `process_problems` (what is
wrong on each rank by itself), `times` (where their time differs), `overview` (one screen about all).
`collectives` is the table of one rank's collectives. Nothing here needs torch.
"""
