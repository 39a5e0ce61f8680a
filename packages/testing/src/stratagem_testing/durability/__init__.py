"""`stratagem checkpoint durability`: whether checkpoints survive, on a user's own file system.

Processes save and are killed; the disk is full, slow, read-only, or fails to sync; one rank of two
is lost. After each of these a process of its own looks at what is there. It has to be a whole
checkpoint: the one that was durable last, or one that was begun after it.

`harness.py` lists the scenarios, `scenarios.py` does each of them, `saver.py` and `judge.py` run in
the processes that save and that look, which `child.py` makes; `faults.py` breaks the disk.
"""
