# Run by test_single_file.py.
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
import torch
from stratagem.checkpoint import SingleFileCheckpointIO

folder = Path("saved")
path = folder / "model.ckpt"
io = SingleFileCheckpointIO()
temporary = lambda: [p for p in folder.iterdir() if p != path]


def save(number):
    weights = [torch.full((500_000,), float(number)) for _ in range(3)]
    io.save_checkpoint({"number": number, "weights": weights}, path)


save(0)
begin = time.perf_counter()
save(0)
a_save = time.perf_counter() - begin
chance = random.Random(int(sys.argv[1]))
last, leftovers = 0, 0
for kill in range(20):
    reading, writing = os.pipe()
    # Forked, not started anew: importing torch takes longer than all the rest.
    writer = os.fork()
    if writer == 0:
        for number in range(last + 1, 10**9):
            os.write(writing, b"%d begun\n" % number)
            save(number)
            os.write(writing, b"%d done\n" % number)
    os.close(writing)
    first = os.read(reading, 1000)
    time.sleep(chance.uniform(0, 4 * a_save))
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    told = first
    while more := os.read(reading, 1 << 16):
        told += more
    os.close(reading)
    begun, done = [0], [last]
    for line in told.decode().splitlines():
        number, what = line.split()
        (begun if what == "begun" else done).append(int(number))
    loaded = io.load_checkpoint(path)
    assert loaded["number"] in (done[-1], begun[-1]), (loaded["number"], done[-1], begun[-1])
    assert all((weights == float(loaded["number"])).all() for weights in loaded["weights"])
    last = begun[-1]
    leftovers += len(temporary())
    save(last)
    assert not temporary()
print(leftovers)
