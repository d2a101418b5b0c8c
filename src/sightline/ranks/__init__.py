"""The recordings of a distributed job as one run.

Each process has written its own recording. `folder` finds them, `record` reduces one to the parts that are
compared, `merge` reads them one after the other, and the rest works on that: `desync` (the first op that
ranks do not share), `messages` (sends and receives that do not match), `collective_waits` (who waits for
whom), `stragglers` (who is late and why), `replicas` (weights, batches and modes that should be equal),
`reduced_gradients` (which weights are replicas), `buffers` (the same of buffers), `rank_ends` (how each rank
ended), `process_problems` (the problems of each rank by itself), `times` (where their time differs),
`overview` (one screen about all).
`collectives` is the table of one rank's collectives. Nothing here needs torch.
"""
